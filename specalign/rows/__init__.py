"""Readers of the rows that users bring: files, folders, data sets, conversations, documents."""
