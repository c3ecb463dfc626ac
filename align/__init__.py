"""Align a discrete-diffusion drafter with a target language model."""
