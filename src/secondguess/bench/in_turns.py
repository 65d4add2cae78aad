"""Decoding of one batch by several of our systems at the same time, one round of each in turn.

If whole texts are timed one after the other, a disturbance of a tenth of a second on a shared
machine slows one system and not the next. With alternating rounds it slows all systems alike, and
only disturbances shorter than a round remain as noise. Systems that need more rounds than others
run their last rounds in turn with fewer systems.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence

from secondguess.bench.systems import Run, SecondguessSystem


def in_turns(
    systems: Mapping[str, SecondguessSystem],
    prompts: Sequence[Sequence[int]],
    num_tokens: int,
    temperature: float,
    seed: int,
) -> dict[str, Run]:
    """Decode the prompts with all systems, one round of each in turn; return a run per system.

    Args:
        systems: by name, each with its own KV caches (`ModelsWithOwnCaches`).
        seed: seed of the texts and of the order of systems, which is shuffled in every turn, since
            each system finds the processor caches as the previous one left them.
    """
    rng = random.Random(seed)
    running_batches = {
        name: system.start(prompts, num_tokens, temperature, seed) for name, system in systems.items()
    }
    playing = list(running_batches)
    while playing:
        rng.shuffle(playing)
        playing = [name for name in playing if running_batches[name].step()]
    return {name: running_batch.run() for name, running_batch in running_batches.items()}
