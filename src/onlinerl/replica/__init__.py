"""The embedded engine's process. The only house, with `learning`, that imports torch."""
