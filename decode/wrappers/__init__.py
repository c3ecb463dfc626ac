"""Drafters around other drafters: copying in front, adaptive length, ahead of the target, side by side, another vocabulary."""
