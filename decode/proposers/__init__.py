"""Proposers of draft tokens: one file per drafting method."""
