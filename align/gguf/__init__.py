"""GGUF files: their header, and their conversion into a folder in hub layout. No model is known here."""
