"""Offline validation: judges instead of users, code that is run, and what was forgotten (torch)."""
