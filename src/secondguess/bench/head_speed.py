"""How much faster a freshly trained drafter makes its target, on this machine and on text that it did not learn from."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from secondguess.api import LLM, load
from secondguess.sampling import SamplingParams
from secondguess.stats import Stats
from secondguess.train.lessons import TaughtText

NUM_PROMPTS, NUM_TOKENS, NUM_TURNS = 4, 48, 2
SHORTEST_PROMPT = 16
"""Of a text that counts from its beginning, so many tokens are the prompt."""


def measure_speed(
    model: str, drafter: str, texts: Sequence[TaughtText], dtype: str, device: str
) -> dict[str, Any]:
    """Greedy decoding with and without the drafter, in turn, one text at a time, under the default controller.

    Args:
        model, drafter, dtype, device: as `load` takes them.
        texts: whose prompts are continued.

    Returns:
        `cost_ratio` of one drafted node to one plain target pass, `acceptance_length`, both `tokens_per_second`, and `speedup`.
    """
    llm = load(model, drafter, dtype=dtype, device=device)
    prompts = [prompt_of(text) for text in texts[:NUM_PROMPTS]]
    _play(llm, prompts[:1], None)
    plain, drafted = Stats(), Stats()
    for turn in range(NUM_TURNS):
        # ABBA: what slows the machine down for a while slows both.
        for is_plain in (True, False) if turn % 2 == 0 else (False, True):
            _add(plain if is_plain else drafted, _play(llm, prompts, 0 if is_plain else None))
    passes = plain.seconds["score"] / max(1, plain.num_rounds)
    steps = drafted.seconds["draft"] / max(1, drafted.num_drafted)
    return {
        "cost_ratio": round(steps / passes, 4) if drafted.num_drafted else None,
        "acceptance_length": round(drafted.acceptance_length, 3),
        "plain_tokens_per_second": round(plain.tokens_per_second, 1),
        "tokens_per_second": round(drafted.tokens_per_second, 1),
        "speedup": round(drafted.tokens_per_second / plain.tokens_per_second, 3),
    }


def prompt_of(text: TaughtText) -> list[int]:
    """What stands before the first token that counts, or the text's beginning."""
    first = text.counts.index(True) if True in text.counts else len(text.tokens)
    return text.tokens[: max(1, min(first or SHORTEST_PROMPT, len(text.tokens) - 1))]


def _play(llm: LLM, prompts: Sequence[list[int]], draft_length: int | None) -> Stats:
    total = Stats()
    for prompt in prompts:
        room = llm.target.runtime.context_length - len(prompt)
        params = SamplingParams(max_tokens=min(NUM_TOKENS, room), temperature=0.0, draft_length=draft_length)
        _add(total, llm.generate_batch([prompt], [params])[0].stats)
    return total


def _add(total: Stats, stats: Stats) -> None:
    total.num_rounds += stats.num_rounds
    total.num_tokens += stats.num_tokens
    total.num_drafted += stats.num_drafted
    for name, seconds in stats.seconds.items():
        total.seconds[name] += seconds
