"""Requests that a prefill and a decode engine serve together, through a whole gateway."""
