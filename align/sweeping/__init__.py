"""Sweeps in W&B's own format, run here without an account."""
