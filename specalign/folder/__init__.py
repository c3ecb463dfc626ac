"""Model folders without their weights: chat template, tokenizer, quantisation."""
