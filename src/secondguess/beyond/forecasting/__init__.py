"""Speculative decoding of continuous values: forecasters that sample step by step.

Rows, noise, controllers and statistics are those of text. A `Distribution` with a density replaces
probabilities over a vocabulary, and one decoder pass over the whole forecast replaces the KV cache.
"""
