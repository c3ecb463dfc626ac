"""Measuring: what is run, in which order, tuned, timed and kept."""
