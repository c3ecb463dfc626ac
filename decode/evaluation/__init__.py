"""Measurements: which methods run and in which order, tuning, timing, records and reports."""
