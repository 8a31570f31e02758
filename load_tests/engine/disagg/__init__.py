"""Prefill/decode disaggregation: how KV goes from one simulated engine to another, protocol by protocol."""
