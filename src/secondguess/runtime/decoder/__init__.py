"""Decoders of known families, as torch runs them and as the kernels read them."""
