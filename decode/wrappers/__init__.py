"""Drafters around other drafters: copying first, adaptive length, drafting ahead, two merged,
another vocabulary."""
