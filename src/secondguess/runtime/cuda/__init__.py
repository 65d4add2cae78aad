"""Forward passes of decoders on a GPU, captured as CUDA graphs."""
