"""Benchmark prompts: one file per suite."""
