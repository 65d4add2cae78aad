"""A Transformers model made speculable: the contract (`base`), the runtime, loading."""
