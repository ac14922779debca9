"""Closes the ring: triggers, runs, publication."""
