"""Compiled kernels that run a decoder's forward pass in one call, and their runtime."""
