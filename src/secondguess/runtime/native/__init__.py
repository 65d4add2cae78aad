"""Compiled kernels that run a dense decoder's forward pass in one call, and their runtime."""
