"""Draft models with another tokenizer than the target's: comparison, translation and drafting."""
