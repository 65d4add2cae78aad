"""Model runtimes for speculative decoding: interface (`base`), implementations and loading."""
