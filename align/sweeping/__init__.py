"""Runs sweeps in W&B's format locally, without an account."""
