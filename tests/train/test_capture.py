"""Capture of the target's hidden states, live and on disk."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from secondguess.checkpoint.loader import load_model
from secondguess.checkpoint.plan import Checkpoint
from secondguess.errors import BadInputError
from secondguess.train.capture import GIGABYTE, LiveCapture, StoredCapture, frozen_float32_embedding_and_head
from secondguess.train.training_data import Batch, TrainingText

TEXTS = [
    TrainingText([(7 * number + 3 * place) % 300 for place in range(5 + number)], [True] * (5 + number))
    for number in range(40)
]
BATCH = Batch.from_texts([(index, TEXTS[index]) for index in (3, 0)])


@pytest.fixture(scope="module")
def target(tiny_checkpoint: Path):
    return load_model(Checkpoint.resolve(tiny_checkpoint, dtype="float32"))


@pytest.mark.parametrize("runtime", ["fused", "transformers"])
def test_hidden_states_equal_those_of_the_module(tiny_checkpoint: Path, runtime: str) -> None:
    loaded = load_model(Checkpoint.resolve(tiny_checkpoint, dtype="float32", runtime=runtime))
    training_batch = LiveCapture(loaded.runtime, (0, 1)).training_batch(BATCH)
    module = load_model(Checkpoint.resolve(tiny_checkpoint, dtype="float32", runtime="transformers"))
    assert loaded.runtime.num_live_rows == 0
    for row, index in enumerate(BATCH.indices):
        tokens = torch.tensor([TEXTS[index].tokens])
        shown = LiveCapture(module.runtime, (0, 1)).states([TEXTS[index].tokens])[0]
        read = module.runtime.probe(tokens).hidden
        for layer in (0, 1, -1):
            expected = read[layer][0]
            torch.testing.assert_close(training_batch.hidden[layer][row, : len(expected)], expected)
            torch.testing.assert_close(shown[layer], expected)
            assert not training_batch.hidden[layer][row, len(expected) :].any()


def test_the_last_hidden_states_give_the_targets_distribution(target) -> None:
    training_batch = LiveCapture(target.runtime, ()).training_batch(BATCH)
    logits = frozen_float32_embedding_and_head(target.runtime).unembed(training_batch.hidden[-1])
    expected = target.runtime.probe(BATCH.tokens[:1]).logits
    torch.testing.assert_close(logits[:1], expected)


def test_gradients_reach_the_head_and_not_the_target(tiny_checkpoint: Path) -> None:
    loaded = load_model(Checkpoint.resolve(tiny_checkpoint, dtype="float32", runtime="transformers"))
    embedding_and_head = frozen_float32_embedding_and_head(loaded.runtime)
    states = torch.ones(2, embedding_and_head.width, requires_grad=True)
    embedding_and_head.unembed(embedding_and_head.normalise(states)).sum().backward()
    assert states.grad is not None
    assert all(weight.grad is None for weight in loaded.runtime.model.parameters())


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_stored_states_are_rounded_live_states(target, tmp_path: Path, dtype: torch.dtype) -> None:
    stored = StoredCapture(tmp_path, TEXTS, (1,), target.runtime, dtype, 1.0)
    live = LiveCapture(target.runtime, (1,)).training_batch(BATCH)
    for _ in range(2):
        read = stored.training_batch(BATCH)
        for layer in (1, -1):
            assert torch.equal(read.hidden[layer], live.hidden[layer].to(dtype).float())


@pytest.fixture
def num_read(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Numbers of texts that the target reads."""
    found: list[int] = []
    states = LiveCapture.states
    monkeypatch.setattr(
        LiveCapture, "states", lambda self, texts: found.append(len(texts)) or states(self, texts)
    )
    return found


def test_a_text_is_captured_once_for_all_runs_and_layers(target, tmp_path: Path, num_read) -> None:
    for layers, expected in (((1,), [2]), ((1,), []), ((), []), ((0,), [2])):
        stored = StoredCapture(tmp_path, TEXTS, layers, target.runtime, torch.float16, 1.0)
        found = stored.training_batch(BATCH)
        assert num_read == expected
        live = LiveCapture(target.runtime, layers).training_batch(BATCH)
        for layer in (*layers, -1):
            assert torch.equal(found.hidden[layer], live.hidden[layer].half().float())
        num_read.clear()
    stored.training_batch(Batch.from_texts([(index, TEXTS[index]) for index in (3, 5)]))
    assert num_read == [1]


def test_states_of_other_texts_or_dtypes_are_removed(target, tmp_path: Path, num_read) -> None:
    for texts, dtype in ((TEXTS, torch.float16), (TEXTS[:9], torch.float16), (TEXTS[:9], torch.bfloat16)):
        StoredCapture(tmp_path, texts, (), target.runtime, dtype, 1.0).training_batch(BATCH)
    assert num_read == [2, 2, 2]


def test_states_behind_a_link_are_not_removed(target, tmp_path: Path, num_read) -> None:
    """Runs of several kinds share states by links."""
    StoredCapture(tmp_path / "states", TEXTS, (), target.runtime, torch.float16, 1.0).training_batch(BATCH)
    (tmp_path / "link").symlink_to(tmp_path / "states")
    with pytest.raises(BadInputError, match="it links to a folder with those of other texts"):
        StoredCapture(tmp_path / "link", TEXTS[:9], (), target.runtime, torch.float16, 1.0)
    StoredCapture(tmp_path / "link", TEXTS, (), target.runtime, torch.float16, 1.0).training_batch(BATCH)
    assert num_read == [2]


@pytest.mark.parametrize("content", ["{", "[]", ""])
def test_states_with_a_broken_record_are_computed_again(target, tmp_path: Path, num_read, content) -> None:
    for _ in range(2):
        StoredCapture(tmp_path, TEXTS, (), target.runtime, torch.float16, 1.0).training_batch(BATCH)
        (tmp_path / "states.json").write_text(content)
    assert num_read == [2, 2]


def test_a_budget_that_is_too_small_is_refused_before_anything_is_written(target, tmp_path: Path) -> None:
    gigabytes = 0.9 * sum(len(text.tokens) for text in TEXTS) * 32 * 2 / GIGABYTE
    with pytest.raises(BadInputError, match=r"--capture-gb of at least .* got"):
        StoredCapture(tmp_path / "states", TEXTS, (), target.runtime, torch.float16, gigabytes)
    assert not (tmp_path / "states").exists()


def test_the_budget_holds_for_training_and_held_out_texts_together(target, tmp_path: Path) -> None:
    gigabytes = 1.5 * sum(len(text.tokens) for text in TEXTS) * 32 * 2 / GIGABYTE
    StoredCapture(tmp_path / "alone", TEXTS, (), target.runtime, torch.float16, gigabytes)
    with pytest.raises(BadInputError, match=r"--capture-gb of at least .* got"):
        StoredCapture(tmp_path / "states", TEXTS, (), target.runtime, torch.float16, gigabytes, TEXTS)


def test_stored_states_need_no_disk_space_again(target, tmp_path: Path, monkeypatch) -> None:
    stored = StoredCapture(tmp_path / "states", TEXTS, (), target.runtime, torch.float16, 1.0)
    stored.training_batch(Batch.from_texts(list(enumerate(TEXTS))))
    monkeypatch.setattr("shutil.disk_usage", lambda folder: SimpleNamespace(free=0))
    StoredCapture(tmp_path / "states", TEXTS, (), target.runtime, torch.float16, 1.0)
    with pytest.raises(BadInputError, match=r"GB of disk, and 0 are free\. Leave out --capture-gb"):
        StoredCapture(tmp_path / "others", TEXTS, (), target.runtime, torch.float16, 1.0)


def test_a_text_may_be_in_a_batch_twice(target, tmp_path: Path, num_read) -> None:
    stored = StoredCapture(tmp_path, TEXTS, (), target.runtime, torch.float16, 1.0)
    hidden = stored.training_batch(Batch.from_texts([(3, TEXTS[3]), (3, TEXTS[3])])).hidden[-1]
    assert torch.equal(hidden[0], hidden[1])
    assert num_read == [1]


def test_states_beyond_the_range_of_float16_are_refused(target, tmp_path: Path, monkeypatch) -> None:
    huge = [{-1: torch.full((len(TEXTS[index].tokens), 32), 1e6)} for index in BATCH.indices]
    monkeypatch.setattr(LiveCapture, "states", lambda self, texts: huge)
    with pytest.raises(BadInputError, match="bfloat16"):
        StoredCapture(tmp_path, TEXTS, (), target.runtime, torch.float16, 1.0).training_batch(BATCH)
