"""Drafters in the formats of other engines."""

EXPORTS = (
    "dflash",
    "speculators",
    "dspark",
    "transformers",
    "gguf",
    "custom_generate",
    "draft_model",
)
"""The formats: the keys of `decode.exporting.registry.FORMATS`, and what an autoregressive drafter
is exported as."""
