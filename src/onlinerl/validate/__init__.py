"""Offline learning: a judge or simulated users instead of people. Imports torch, nothing that serves or stores."""
