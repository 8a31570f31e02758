"""Workloads: what clients ask, made from a seed or read from a trace."""
