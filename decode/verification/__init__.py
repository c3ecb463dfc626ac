"""Checks losslessness: six exact checks on recorded decoding rounds, and where two outputs
diverge."""
