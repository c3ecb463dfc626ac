"""What the target computes over packed rows: once, then from memory or disk."""
