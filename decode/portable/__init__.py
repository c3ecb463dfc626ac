"""What leaves the house as source: a drafter's network and its decoding loop, for torch and transformers alone."""
