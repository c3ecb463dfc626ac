"""Shared utilities: user errors, atomic files, locks, the Hub, YAML and JSON, random states."""
