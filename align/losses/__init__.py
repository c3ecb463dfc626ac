"""The objective and what it is made of, per position and unreduced."""
