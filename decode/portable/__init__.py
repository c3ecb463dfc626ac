"""Source that is copied into `custom_generate` exports: a drafter's network and decoding loop, for
torch and transformers alone."""
