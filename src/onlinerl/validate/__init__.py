"""Offline learning: judges or simulated users instead of people, and its measures. No server, no store (torch)."""
