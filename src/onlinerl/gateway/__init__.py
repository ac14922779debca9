"""The HTTP interface: completions, feedback, health. One application on both ports."""
