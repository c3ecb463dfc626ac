"""Drafters in the formats of other engines."""

EXPORTS = (
    "dflash", "speculators", "dspark", "transformers", "gguf", "custom_generate", "draft_model",
)  # fmt: skip
"""The formats: those of block drafters, and `draft_model`, an autoregressive one's."""
