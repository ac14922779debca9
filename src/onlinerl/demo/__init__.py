"""`onlinerl demo`: the whole ring on this machine, finite, with an account of what it measured."""
