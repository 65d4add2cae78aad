"""Decoding of one batch by several of our systems at the same time, one round of each in turn.

If whole texts are timed one after the other, a disturbance of a tenth of a second on a shared
machine slows one system and not the next. With alternating rounds it slows all systems alike, and
only disturbances shorter than a round remain as noise. Systems that need more rounds than others
run their last rounds in turn with fewer systems.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from secondguess.bench.systems import Models, Run, SecondguessSystem
from secondguess.checkpoint.loaded import LoadedModel
from secondguess.runtime.cached import CachedRuntime


class ModelsWithOwnCaches(Models):
    """Models that share the weights of `lender` but have KV caches of their own.

    Systems that decode texts at the same time need separate caches.

    Raises:
        UnsupportedModelError: a runtime that cannot share its weights.
    """

    def __init__(self, lender: Models) -> None:
        self._name = lender._name
        self.target = with_own_cache(lender.target)
        self._lender = lender
        self._draft_models = {}

    def _load_draft_model(self, name: str) -> LoadedModel:
        return with_own_cache(self._lender.draft_model(name))


def with_own_cache(loaded: LoadedModel) -> LoadedModel:
    """Return the same weights in a runtime with a KV cache of its own."""
    apart = loaded.runtime.skip_layers(())
    assert isinstance(apart, CachedRuntime)  # true of every loaded model
    return replace(loaded, runtime=apart)


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


def warm_up(systems: Mapping[str, SecondguessSystem], batch: Sequence[Sequence[int]]) -> None:
    """Decode a batch, and discard what was learnt and cached."""
    in_turns(systems, batch, 32, 0.0, 0)
    for system in systems.values():
        system.reset()
        system.release()


def repeat_in_turns(
    systems: Mapping[str, SecondguessSystem],
    batches: Sequence[Sequence[Sequence[int]]],
    num_tokens: int,
    temperature: float,
    repeats: int,
) -> Iterator[dict[str, list[list[Run]]]]:
    """Decode all batches several times; yield the runs so far by system and batch after every repeat.

    Memory placement affects processor caches: allocating KV caches anew for every repeat turns this into noise
    instead of a constant advantage of one system.
    """
    runs: dict[str, list[list[Run]]] = {name: [[] for _ in batches] for name in systems}
    for _ in range(repeats):
        for system in systems.values():
            system.release()
        for number, batch in enumerate(batches):
            for name, run in in_turns(systems, batch, num_tokens, temperature, number).items():
                runs[name][number].append(run)
        yield runs
