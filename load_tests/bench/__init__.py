"""Benchmarks: CPU of the gateway beside its peers, and of the prefix index. ``python -m load_tests.bench``."""
