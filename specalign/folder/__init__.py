"""What a model's files say before its weights are read: template, tokenizer, quantisation."""
