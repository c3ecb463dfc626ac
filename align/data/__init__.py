"""Training data: prompts, what the target writes, shards on disk, packed rows."""
