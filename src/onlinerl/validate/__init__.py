"""Offline learning: judges or simulated users instead of people, and what it is measured by (torch)."""
