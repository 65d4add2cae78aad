"""Model runtimes for speculative decoding: interface (`base`) and implementations."""
