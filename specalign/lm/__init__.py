"""The target: loading it, running it, its key-value cache, its attention and its linear layers."""
