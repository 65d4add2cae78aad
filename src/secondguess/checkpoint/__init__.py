"""Checkpoints: lookup of their names, settings of loading, memory, and loading itself.

`resolve` and `weights` import neither torch nor Transformers.
"""
