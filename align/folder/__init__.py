"""What the files of a model say before its weights are read: chat template, tokenizer, ends of text, quantisation."""
