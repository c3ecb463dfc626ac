"""Training data: prompts, generated text, shards on disk, packed rows."""
