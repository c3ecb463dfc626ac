"""Rows that users bring, whatever their form: files, folders and data sets in, conversations and documents out."""
