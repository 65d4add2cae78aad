"""A dense decoder's forward in one call: the kernels, how they are reached, and the runtime that runs them."""
