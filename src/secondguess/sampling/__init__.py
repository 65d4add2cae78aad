"""Sampling: settings, probabilities, noise, and the text of sampled tokens."""

from secondguess.params import Grammar, SamplingParams

__all__ = ["Grammar", "SamplingParams"]
