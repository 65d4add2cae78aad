"""Capture of the target's hidden states, live and on disk."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from secondguess.checkpoint.checkpoint import Checkpoint
from secondguess.errors import BadInputError
from secondguess.train.capture import GIGABYTE, LiveCapture, StoredCapture, frozen_float32_embedding_and_head
from secondguess.train.training_data import Batch, TrainingText

TEXTS = [
    TrainingText([(7 * number + 3 * place) % 300 for place in range(5 + number)], [True] * (5 + number))
    for number in range(40)
]
BATCH = Batch.of([(index, TEXTS[index]) for index in (3, 0)])


@pytest.fixture(scope="module")
def target(tiny_checkpoint: Path):
    return Checkpoint.resolve(tiny_checkpoint, dtype="float32").load()


@pytest.mark.parametrize("runtime", ["fused", "transformers"])
def test_hidden_states_equal_those_of_the_module(tiny_checkpoint: Path, runtime: str) -> None:
    loaded = Checkpoint.resolve(tiny_checkpoint, dtype="float32", runtime=runtime).load()
    training_batch = LiveCapture(loaded.runtime, (0, 1)).training_batch(BATCH)
    module = Checkpoint.resolve(tiny_checkpoint, dtype="float32", runtime="transformers").load()
    assert loaded.runtime.num_live_rows == 0
    for row, index in enumerate(BATCH.indices):
        tokens = torch.tensor([TEXTS[index].tokens])
        shown = LiveCapture(module.runtime, (0, 1)).states([TEXTS[index].tokens])[0]
        read = module.runtime.read(tokens).hidden
        for layer in (0, 1, -1):
            expected = read[layer][0]
            torch.testing.assert_close(training_batch.hidden[layer][row, : len(expected)], expected)
            torch.testing.assert_close(shown[layer], expected)
            assert not training_batch.hidden[layer][row, len(expected) :].any()


def test_the_last_hidden_states_give_the_targets_distribution(target) -> None:
    training_batch = LiveCapture(target.runtime, ()).training_batch(BATCH)
    logits = frozen_float32_embedding_and_head(target.runtime).unembed(training_batch.hidden[-1])
    expected = target.runtime.read(BATCH.tokens[:1]).logits
    torch.testing.assert_close(logits[:1], expected)


def test_gradients_reach_the_head_and_not_the_target(tiny_checkpoint: Path) -> None:
    loaded = Checkpoint.resolve(tiny_checkpoint, dtype="float32", runtime="transformers").load()
    embedding_and_head = frozen_float32_embedding_and_head(loaded.runtime)
    states = torch.ones(2, embedding_and_head.width, requires_grad=True)
    embedding_and_head.unembed(embedding_and_head.normalise(states)).sum().backward()
    assert states.grad is not None
    assert all(weight.grad is None for weight in loaded.runtime.model.parameters())


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_stored_states_are_rounded_live_states(target, tmp_path: Path, dtype: torch.dtype) -> None:
    lines: list[str] = []
    stored = StoredCapture(tmp_path, TEXTS, (1,), target.runtime, dtype)
    stored.fill(1.0, lines.append)
    live = LiveCapture(target.runtime, (1,)).training_batch(BATCH)
    read = stored.training_batch(BATCH)
    for layer in (1, -1):
        assert torch.equal(read.hidden[layer], live.hidden[layer].to(dtype).float())
    on_disk = sum(path.stat().st_size for path in tmp_path.glob("*.safetensors"))
    assert stored.num_bytes(TEXTS) <= on_disk < stored.num_bytes(TEXTS) + 200 * len(TEXTS)
    assert "of the 1 allowed" in lines[0]


def test_an_interrupted_capture_is_resumed(target, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[int] = []
    states = LiveCapture.states

    def counting(self, texts):
        if read:
            raise KeyboardInterrupt
        read.append(len(texts))
        return states(self, texts)

    monkeypatch.setattr(LiveCapture, "states", counting)
    with pytest.raises(KeyboardInterrupt):
        StoredCapture(tmp_path, TEXTS, (), target.runtime, torch.float16).fill(1.0, str)
    monkeypatch.setattr(
        LiveCapture, "states", lambda self, texts: read.append(len(texts)) or states(self, texts)
    )
    again = StoredCapture(tmp_path, TEXTS, (), target.runtime, torch.float16)
    again.fill(1.0, str)
    assert read == [32, 8]
    live = LiveCapture(target.runtime, ()).training_batch(BATCH)
    assert torch.equal(again.training_batch(BATCH).hidden[-1], live.hidden[-1].half().float())


def test_states_of_other_layers_or_dtypes_are_captured_again(target, tmp_path: Path) -> None:
    for layers, dtype in (((), torch.float16), ((1,), torch.float16), ((1,), torch.bfloat16)):
        stored = StoredCapture(tmp_path, TEXTS, layers, target.runtime, dtype)
        stored.fill(1.0, str)
        assert len(list(tmp_path.glob("*.safetensors"))) == len(TEXTS)
        live = LiveCapture(target.runtime, layers).training_batch(BATCH)
        for layer in (*layers, -1):
            assert torch.equal(
                stored.training_batch(BATCH).hidden[layer], live.hidden[layer].to(dtype).float()
            )


def test_a_budget_that_is_too_small_is_refused_before_anything_is_written(target, tmp_path: Path) -> None:
    stored = StoredCapture(tmp_path / "states", TEXTS, (), target.runtime, torch.float16)
    with pytest.raises(BadInputError, match=r"--capture-gb of at least .* got"):
        stored.fill(0.9 * stored.num_bytes(TEXTS) / GIGABYTE, str)
    assert not (tmp_path / "states").exists()


def test_states_beyond_the_range_of_float16_are_refused(target, tmp_path: Path, monkeypatch) -> None:
    huge = [{-1: torch.full((len(text.tokens), 32), 1e6)} for text in TEXTS]
    monkeypatch.setattr(LiveCapture, "states", lambda self, texts: huge[: len(texts)])
    with pytest.raises(BadInputError, match="bfloat16"):
        StoredCapture(tmp_path, TEXTS, (), target.runtime, torch.float16).fill(1.0, str)
