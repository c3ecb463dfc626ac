"""Drafters that wrap other drafters: copies first, adaptive length, drafting ahead, two merged, another vocabulary."""
