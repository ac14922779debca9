"""Offline learning: a judge or simulated users instead of people (torch); nothing that serves or stores."""
