"""Training of the pair: exact resumption, growing depth, and atomic files."""

from __future__ import annotations

import os
import time
from dataclasses import replace
from math import log
from pathlib import Path

import pytest
import torch

from builtin_pair.checkpoints import read_checkpoint
from builtin_pair.evaluate import bits_per_byte
from builtin_pair.growth import deepened, layer_sources
from builtin_pair.model import Decoder, ModelShape
from builtin_pair.schedule import Phase, RunSettings
from builtin_pair.threads import threads_to_use
from builtin_pair.tokens import TokenStore
from builtin_pair.trainer import Trainer
from secondguess.errors import BadInputError, CheckpointError
from secondguess.files import write_atomically
from secondguess.train.run_folder import Budget
from secondguess.train.training_data import shuffled_index

SHAPE = ModelShape(4, 32, 2, 1, 64, 512)
PHASES = (Phase(0.5, 2, 16, 64), Phase(1.0, 4, 32, 128))
SETTINGS = RunSettings(
    PHASES, Budget(steps=10), micro_tokens=64, warmup_steps=2, compile=False, checkpoint_seconds=1e9
)


def trainer(store: TokenStore, checkpoint: Path, settings: RunSettings = SETTINGS) -> Trainer:
    return Trainer(SHAPE, settings, store, checkpoint, report=lambda line: None)


def stop_after(run: Trainer, steps: int) -> None:
    """Interrupt a run as Ctrl-C would, in the middle of step ``steps + 1``."""
    compute = run.loss_function

    def interrupted(decoder: Decoder, rows: torch.Tensor) -> torch.Tensor:
        if run.step == steps:
            raise KeyboardInterrupt
        return compute(decoder, rows)

    run.loss_function = interrupted
    with pytest.raises(KeyboardInterrupt):
        run.run()


def assert_same(first: Trainer, second: Trainer) -> None:
    weights, others = first.decoder.state_dict(), second.decoder.state_dict()
    assert weights.keys() == others.keys()
    assert all(torch.equal(weight, others[name]) for name, weight in weights.items())


@pytest.mark.parametrize("steps", [3, 5, 8], ids=["before stacking", "at the stacking", "after it"])
def test_an_interrupted_run_ends_with_the_weights_of_an_uninterrupted_one(
    store: TokenStore, tmp_path: Path, steps: int
) -> None:
    whole = trainer(store, tmp_path / "whole.pt")
    whole.run()
    stop_after(trainer(store, tmp_path / "cut.pt"), steps)
    assert read_checkpoint(tmp_path / "cut.pt")["step"] == steps
    again = trainer(store, tmp_path / "cut.pt")
    again.run()
    assert (again.step, again.tokens) == (whole.step, whole.tokens)
    assert_same(whole, again)


def test_a_run_can_be_resumed_with_another_thread_count(store: TokenStore, tmp_path: Path) -> None:
    threads = torch.get_num_threads()
    stop_after(trainer(store, tmp_path / "run.pt"), 4)
    try:
        torch.set_num_threads(1 if threads > 1 else 2)
        run = trainer(store, tmp_path / "run.pt")
        run._take_step()
    finally:
        torch.set_num_threads(threads)
    assert run.step == 5


def test_an_interruption_between_optimisers_keeps_the_earlier_checkpoint(
    store: TokenStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = trainer(store, tmp_path / "run.pt")
    stop_after(run, 3)

    def interrupt() -> None:
        raise KeyboardInterrupt

    later = trainer(store, tmp_path / "run.pt")
    monkeypatch.setattr(later.adam, "step", interrupt)
    with pytest.raises(KeyboardInterrupt):
        later.run()
    assert read_checkpoint(tmp_path / "run.pt")["step"] == 3
    assert_same(run, trainer(store, tmp_path / "run.pt"))


def test_stacked_layers_repeat_the_trained_ones_with_their_momentum(
    store: TokenStore, tmp_path: Path
) -> None:
    run = trainer(store, tmp_path / "run.pt")
    for _ in range(3):
        run._take_step()
    before = {name: weight.clone() for name, weight in run.decoder.state_dict().items()}
    run._deepen(4)
    after = run.decoder.state_dict()
    momentum = run._named_state()
    for layer in range(4):
        for name, weight in after.items():
            if name.startswith(f"model.layers.{layer}."):
                source = name.replace(f"layers.{layer}.", f"layers.{layer % 2}.")
                assert torch.equal(weight, before[source])
                assert {key: str(value) for key, value in momentum[name].items()} == {
                    key: str(value) for key, value in momentum[source].items()
                }
    assert torch.equal(after["model.embed_tokens.weight"], before["model.embed_tokens.weight"])


@pytest.mark.parametrize("num_layers", [3, 5])
def test_inserted_layers_do_not_change_the_logits(store: TokenStore, tmp_path: Path, num_layers: int) -> None:
    run = trainer(store, tmp_path / "run.pt")
    for _ in range(3):
        run._take_step()
    rows = store.held_out_batch(2, 16)
    before, momentum = run.decoder(rows), run._named_state()
    run._deepen(num_layers)
    assert torch.equal(run.decoder(rows), before)
    fresh = {name for name, _ in run.decoder.named_parameters()} - run._named_state().keys()
    new_layers = [layer for layer, (_, new) in enumerate(layer_sources(2, num_layers)) if new]
    assert fresh == {
        name
        for name, _ in run.decoder.named_parameters()
        if any(name.startswith(f"model.layers.{layer}.") for layer in new_layers)
    }
    assert momentum.keys() < {name for name, _ in run.decoder.named_parameters()}


def test_a_model_cannot_be_made_shallower() -> None:
    with pytest.raises(BadInputError, match="cannot be deepened to 1"):
        deepened(Decoder(replace(SHAPE, num_layers=2)), 1)


def test_a_larger_budget_continues_the_flat_part_and_not_the_annealed_end(
    store: TokenStore, tmp_path: Path
) -> None:
    trainer(store, tmp_path / "run.pt").run()
    assert trainer(store, tmp_path / "run.pt").step == 10
    longer = trainer(store, tmp_path / "run.pt", replace(SETTINGS, budget=Budget(steps=40)))
    assert (
        longer.step == 7
    )  # the rate falls over the last 35 %: step 7 of 10 is the first that would be slower


def test_training_lowers_bits_per_byte(store: TokenStore, tmp_path: Path) -> None:
    settings = replace(SETTINGS, budget=Budget(steps=25), phases=(Phase(1.0, 4, 32, 512),), micro_tokens=512)
    run = trainer(store, tmp_path / "run.pt", settings)
    before = bits_per_byte(run.decoder, store, rows=8, length=64)
    run.run()
    assert (
        bits_per_byte(run.decoder, store, rows=8, length=64) < before - 1.0 / log(2) / store.bytes_per_token
    )


def test_the_learning_rate_warms_up_stays_and_decays_to_zero() -> None:
    settings = replace(SETTINGS, warmup_steps=4, decay_share=0.5)
    assert settings.rate_at(0.0, 0) == 0.25
    assert settings.rate_at(0.3, 100) == settings.rate_at(0.5, 100) == 1.0
    assert settings.rate_at(0.75, 100) == 0.5
    assert settings.rate_at(1.0, 100) == 0.0


def test_a_budget_of_minutes_or_steps_ends_with_the_first_that_is_spent() -> None:
    budget = Budget(minutes=1, steps=100)
    assert budget.progress(30, 10) == 0.5
    assert budget.progress(6, 70) == 0.7
    assert budget.progress(90, 10) == 1.0


@pytest.mark.parametrize("content", [b"", b"not a checkpoint", None], ids=["empty", "foreign", "missing"])
def test_a_broken_or_missing_checkpoint_is_refused(tmp_path: Path, content: bytes | None) -> None:
    path = tmp_path / "run.pt"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(CheckpointError, match=r"run\.pt"):
        read_checkpoint(path)


def test_a_checkpoint_of_another_kind_or_shape_is_refused(store: TokenStore, tmp_path: Path) -> None:
    torch.save({"weights": {}}, tmp_path / "run.pt")
    with pytest.raises(CheckpointError, match="lacks"):
        read_checkpoint(tmp_path / "run.pt")
    trainer(store, tmp_path / "other.pt").save()
    with pytest.raises(CheckpointError, match="another shape"):
        Trainer(replace(SHAPE, mlp_size=32), SETTINGS, store, tmp_path / "other.pt", report=lambda line: None)


def test_an_interrupted_write_keeps_the_earlier_file(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"earlier")

    def interrupted() -> None:
        with write_atomically(path) as stream:
            stream.write(b"half")
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert path.read_bytes() == b"earlier"
    assert list(tmp_path.iterdir()) == [path]


def test_what_a_killed_process_has_left_is_removed_by_the_next_write(tmp_path: Path) -> None:
    abandoned, running = left = [tmp_path / f".file.{number}.partial" for number in (7, 8)]
    for each in left:
        each.write_bytes(b"half")
    hours_ago = time.time() - 7200
    os.utime(abandoned, (hours_ago, hours_ago))
    with write_atomically(tmp_path / "file") as stream:
        stream.write(b"whole")
    assert sorted(tmp_path.iterdir()) == sorted([running, tmp_path / "file"])


def test_invalid_budgets_are_refused() -> None:
    with pytest.raises(BadInputError, match="minutes or steps"):
        Budget()
    with pytest.raises(BadInputError, match="positive"):
        Budget(minutes=-1)


def test_rows_depend_only_on_the_step_and_an_epoch_visits_every_row(store: TokenStore) -> None:
    assert torch.equal(store.batch(1, 5, 4, 32), store.batch(1, 5, 4, 32))
    assert not torch.equal(store.batch(1, 5, 4, 32), store.batch(1, 6, 4, 32))
    for size in (1, 2, 12, 97):
        assert sorted(shuffled_index(3, 1, index, size) for index in range(size)) == list(range(size))
        assert sorted(shuffled_index(3, 1, index + size, size) for index in range(size)) == list(range(size))


def test_the_number_of_threads_follows_the_load() -> None:
    assert [threads_to_use(others, 2, 2) for others in (0.0, 0.1, 0.3, 1.0, 3.0)] == [2, 2, 1, 1, 1]
    assert [threads_to_use(others, 8, 8) for others in (0.0, 0.5, 3.1, 20.0)] == [8, 7, 5, 1]
    # With more cores than threads, the load takes the other cores first.
    assert [threads_to_use(others, 8, 2) for others in (0.0, 5.0, 7.0)] == [2, 2, 1]
