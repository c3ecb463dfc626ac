"""Speculative decoding on tensors: sampling, proposals, trees, verification. Independent of any
model."""
