"""Decoding: propose, forward, verify, commit; the decoder and its output."""
