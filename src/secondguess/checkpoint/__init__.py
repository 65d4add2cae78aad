"""Checkpoints: lookup of their names, settings of loading, memory, and loading itself.

`resolve` imports neither torch nor Transformers.
"""
