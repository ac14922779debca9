"""Immutable version folders."""
