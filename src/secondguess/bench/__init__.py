"""Benchmarks and tunings of systems that decode the same prompts in turn."""
