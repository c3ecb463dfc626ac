"""Speculative decoding as tensors: sampling, proposals, trees, verification. No model is known
here."""
