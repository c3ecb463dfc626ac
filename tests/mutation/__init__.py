"""Mutation testing: one-line changes to the code, each of which some test has to notice."""
