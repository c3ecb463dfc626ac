"""Measuring: what runs, in which order, how it is tuned, timed and recorded."""
