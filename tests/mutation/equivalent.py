"""Mutants that no test can kill, and why."""

EQUIVALENT: dict[str, str] = {}
"""By name, as `python -m tests.mutation` prints it."""
