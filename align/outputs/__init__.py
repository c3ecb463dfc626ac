"""The target's outputs for packed rows: computed once, then read from memory or disk."""
