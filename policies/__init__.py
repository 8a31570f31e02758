"""Routing decisions: pure functions from (request, fleet, now) to a choice. One policy a file; see `policies.base`."""
