"""Decoding speed with a newly trained drafter, measured on this machine and on held-out text."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from secondguess.api import LLM, PLAIN_DECODING, Generation, load
from secondguess.bench.summary import sum_stats
from secondguess.controllers import make_controller
from secondguess.drafters.none import NoDrafter
from secondguess.sampling import SamplingParams
from secondguess.stats import Stats
from secondguess.train.training_data import TrainingText

NUM_PROMPTS, NUM_TOKENS, NUM_REPETITIONS = 4, 48, 2
DEFAULT_PROMPT_LENGTH = 16
"""Length of the prompt for a text in which every token counts."""


def measure_speed(
    model: str, drafter: str, texts: Sequence[TrainingText], dtype: str, device: str
) -> dict[str, Any]:
    """Measure greedy decoding with and without the drafter, in turn, at batch size 1.

    The drafter is used with the default controller. If it never drafted, the cost ratio (time per drafted node over
    time per plain target pass) is None, and if no draft was accepted, the speed-up, which would be noise.
    """
    with_drafter = load(model, drafter, dtype=dtype, device=device)
    # Both share the target: each run requests the hidden states it needs, plain decoding none.
    without = LLM(with_drafter.target, NoDrafter(), with_drafter.verifier, make_controller(PLAIN_DECODING))
    prompts = [prompt_of(text) for text in texts[:NUM_PROMPTS]]
    runs: dict[LLM, list[Stats]] = {without: [], with_drafter: []}
    for llm in runs:
        _play(llm, prompts[:1])
    for turn in range(NUM_REPETITIONS):
        # ABBA order, so that a temporary slowdown of the machine affects both.
        for llm in runs if turn % 2 == 0 else reversed(runs):
            runs[llm] += _play(llm, prompts)
    plain, drafted = (sum_stats(stats) for stats in runs.values())
    passes = plain.seconds["score"] / max(1, plain.num_rounds)
    steps = drafted.drafting_seconds / max(1, drafted.num_drafted)
    ratio = drafted.tokens_per_second / plain.tokens_per_second
    return {
        "cost_ratio": round(steps / passes, 4) if drafted.num_drafted else None,
        "acceptance_length": round(drafted.acceptance_length, 3),
        "plain_tokens_per_second": round(plain.tokens_per_second, 1),
        "tokens_per_second": round(drafted.tokens_per_second, 1),
        "speedup": round(ratio, 3) if drafted.num_accepted else None,
    }


def prompt_of(text: TrainingText) -> list[int]:
    """Return the tokens before the first one that counts, or else the beginning of the text."""
    first = text.counts.index(True) if True in text.counts else len(text.tokens)
    return text.tokens[: max(1, min(first or DEFAULT_PROMPT_LENGTH, len(text.tokens) - 1))]


def _play(llm: LLM, prompts: Sequence[list[int]]) -> list[Stats]:
    found = []
    for prompt in prompts:
        room = llm.target.runtime.context_length - len(prompt)
        params = SamplingParams(max_tokens=min(NUM_TOKENS, room), temperature=0.0)
        found.append(Generation(llm, [prompt], [params]).run()[0].stats)
    return found
