"""Decoding in turns, one round of each system: text and times are those of the system alone."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from in_turns import ModelsWithOwnCaches, in_turns, with_own_cache

from secondguess.bench import systems as systems_module
from secondguess.bench.systems import Models, SecondguessSystem
from secondguess.checkpoint.loader import load_model
from secondguess.checkpoint.plan import Checkpoint
from secondguess.errors import UnsupportedModelError

PROMPTS = [[1, 2, 3, 4, 2, 3], [3, 2, 1]]


@pytest.fixture(scope="module")
def models(tiny_checkpoint):
    return Models(str(tiny_checkpoint), "float32", "cpu")


def drafter_names(draft_checkpoint):
    return {"plain": "none", "look-up": "ngram", "model": f"model:{draft_checkpoint}", "again": "none"}


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_systems_in_turns_generate_the_same_text_as_alone(models, tiny_draft_checkpoint, temperature):
    names = drafter_names(tiny_draft_checkpoint)
    together = {
        name: SecondguessSystem(
            ModelsWithOwnCaches(models), drafter, "fixed:2" if drafter != "none" else None
        )
        for name, drafter in names.items()
    }
    runs = in_turns(together, PROMPTS, 9, temperature, seed=3)
    for name, drafter in names.items():
        alone = SecondguessSystem(models, drafter, "fixed:2" if drafter != "none" else None)
        expected = alone.generate(PROMPTS, 9, temperature, seed=3)
        assert runs[name].texts == expected.texts
        assert runs[name].stats.num_rounds == expected.stats.num_rounds


def test_rounds_alternate_and_rounds_of_other_systems_are_not_charged(models, monkeypatch):
    """A system whose rounds are slow is charged for them, its neighbour is not."""
    systems = {name: SecondguessSystem(ModelsWithOwnCaches(models), "none") for name in ("quick", "slow")}
    order, clock = [], [0.0]
    monkeypatch.setattr(systems_module, "time", SimpleNamespace(perf_counter=lambda: clock[-1]))
    for name, system in systems.items():
        runtime = system._target.runtime
        score = runtime.score

        def scored(rows, draft, name=name, score=score):
            order.append(name)
            clock.append(clock[-1] + (1.0 if name == "slow" else 0.25))
            return score(rows, draft)

        monkeypatch.setattr(runtime, "score", scored)
    runs = in_turns(systems, PROMPTS, 5, 0.0, seed=0)
    assert all(set(order[turn : turn + 2]) == {"quick", "slow"} for turn in range(0, len(order), 2))
    assert len({tuple(order[turn : turn + 2]) for turn in range(0, len(order), 2)}) == 2
    assert (runs["slow"].seconds, runs["quick"].seconds) == (5.0, 1.25)


def test_a_draft_model_is_read_once_and_shared(models, tiny_draft_checkpoint):
    one, other = ModelsWithOwnCaches(models), ModelsWithOwnCaches(models)
    name = str(tiny_draft_checkpoint)
    assert one.draft_model(name).runtime is not other.draft_model(name).runtime
    first, second = (each.draft_model(name).runtime.decoder.embedding for each in (one, other))
    assert first.data_ptr() == second.data_ptr()


def test_weights_that_cannot_be_shared_are_refused(tiny_checkpoint):
    whole = load_model(Checkpoint.resolve(str(tiny_checkpoint), dtype="float32", runtime="transformers"))
    with pytest.raises(UnsupportedModelError, match="runs as a whole"):
        with_own_cache(whole)


def test_a_released_cache_is_allocated_again(models):
    system = SecondguessSystem(ModelsWithOwnCaches(models), "none")
    first = system.generate(PROMPTS, 5, 0.0, seed=0)
    assert system._target.runtime.cache.keys
    system.release()
    assert not system._target.runtime.cache.keys
    assert system.generate(PROMPTS, 5, 0.0, seed=0).texts == first.texts
