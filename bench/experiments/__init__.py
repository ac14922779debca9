"""Simulated experiments on live users: `python -m bench.experiments`."""
