"""GGUF files: header, configuration, tokenizer and weights."""
