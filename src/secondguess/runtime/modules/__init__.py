"""Runtimes over Transformers modules, and their linear layers on the kernels."""
