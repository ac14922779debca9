"""Clients of engines. Nothing here imports torch."""
