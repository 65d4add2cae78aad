"""Training of the built-in target and draft model from nothing: corpus, tokenizer, growth, distillation."""
