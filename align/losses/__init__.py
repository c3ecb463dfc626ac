"""The training objective and its terms, per position and unreduced."""
