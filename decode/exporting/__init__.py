"""Block drafters in the formats of other engines."""

EXPORTS = ("dflash", "speculators", "dspark", "transformers", "custom_generate")
