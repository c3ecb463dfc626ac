"""Drafters as other programs load them: formats, an independent reader of what was written, and the ladder that compares both."""
