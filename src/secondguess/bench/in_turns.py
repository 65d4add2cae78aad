"""Several of our own systems decode one batch at the same time, a round of each in turn.

Where whole texts are timed one after the other, what else happens on a shared machine for a tenth of a second hits one system
and not the next. Between rounds everybody is hit alike: what is left of the noise are disturbances shorter than a round. Only
the last rounds of those who need most of them are played among fewer.
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
    """What each system says and how long it took.

    Args:
        systems: by name, each with caches of its own (`ModelsApart`).
        seed: of the texts; also of the order, drawn anew in every turn, since each finds what the one before left in the
            processor's caches.
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
