"""Offline learning: a judge or simulated users instead of people. Needs torch, no server and no store."""
