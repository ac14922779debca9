"""Prompts from real code, and simulated developers who work on them."""
