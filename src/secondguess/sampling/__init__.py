"""Sampling: settings, probabilities, noise, and the text of sampled tokens."""

from secondguess.sampling.grammar import Grammar
from secondguess.sampling.params import SamplingParams

__all__ = ["Grammar", "SamplingParams"]
