"""Who gets what: pure functions."""
