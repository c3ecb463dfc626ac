"""Inspects a target's architecture by examining its modules and by running them."""
