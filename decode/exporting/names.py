"""Names of the export formats. No torch."""

EXPORTS = ("dflash", "speculators", "dspark", "transformers", "gguf", "custom_generate", "draft_model")
"""The keys of `decode.exporting.registry.FORMATS`, and `draft_model`, what an autoregressive drafter is exported as."""
