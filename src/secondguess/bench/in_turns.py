"""Decoding of one batch by several of our systems at the same time, one round of each in turn.

If whole texts are timed one after the other, a disturbance of a tenth of a second on a shared
machine slows one system and not the next. With alternating rounds it slows all systems alike, and
only disturbances shorter than a round remain as noise. Systems that need more rounds than others
run their last rounds in turn with fewer systems.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence

from secondguess.bench.systems import Run, Speculator


def in_turns(
    systems: Mapping[str, Speculator],
    prompts: Sequence[Sequence[int]],
    num_tokens: int,
    temperature: float,
    seed: int,
) -> dict[str, Run]:
    """Decode the prompts with all systems, one round of each in turn; return a run per system.

    Args:
        systems: by name, each with its own KV caches (`ModelsApart`).
        seed: seed of the texts and of the order of systems, which is shuffled in every turn, since
            each system finds the processor caches as the previous one left them.
    """
    dice = random.Random(seed)
    performances = {
        name: system.perform(prompts, num_tokens, temperature, seed) for name, system in systems.items()
    }
    playing = list(performances)
    while playing:
        dice.shuffle(playing)
        playing = [name for name in playing if performances[name].play()]
    return {name: performance.run() for name, performance in performances.items()}
