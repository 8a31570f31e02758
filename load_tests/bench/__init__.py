"""Benchmarks: CPU of the gateway beside its peers, and of the prefix index. ``python -m load_tests.bench``; Linux only.

One contender at a time runs on a core of its own; the load generator and the mock engines share another. What counts is the
CPU clock of the contender's process tree, which survives a noisy machine as requests a second and latencies do not. Every
round measures every contender in another order, and medians over the rounds are told.
"""
