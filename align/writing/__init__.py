"""Generating training text with the target: in this process, in several, or by a server."""
