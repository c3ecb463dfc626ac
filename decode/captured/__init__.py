"""The captured round: the decoding loop as tensor code of fixed shapes, for GPUs."""
