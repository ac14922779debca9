"""onlinerl plugs online reinforcement learning into a deployed LLM service."""

__version__ = "0.1.0"
