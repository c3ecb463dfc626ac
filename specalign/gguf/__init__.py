"""GGUF files: header, checks, and conversion into a hub-layout folder."""
