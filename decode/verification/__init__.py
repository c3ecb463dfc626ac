"""Checks losslessness: six checks on recorded decoding rounds, and where two outputs
diverge."""
