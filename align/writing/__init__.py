"""Generates training text with the target: in this process or with a server."""
