"""Comparison of every causal language model class of Transformers with Transformers alone."""
