"""Fixtures of these tests, next to those of tests/conftest.py."""

from tests.fixtures import samples, target

__all__ = ["samples", "target"]
