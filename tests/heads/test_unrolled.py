"""Heads that read their own hidden states: training equals drafting and lowers the loss."""

from __future__ import annotations

import pytest
import torch
from head_formats import cross_entropy

from secondguess.heads.feature import default_layer_config
from secondguess.heads.runtime import FeatureRuntime
from unrolled_cases import (
    TEXT,
    UNROLLED,
    drafted_logits,
    drafts_as_it_learned,
    fresh_head,
    lesson_of,
    target_model,
    target_of,
    unrolled_logits,
)

every_head = pytest.mark.parametrize("kind", UNROLLED)


@every_head
@pytest.mark.parametrize("length", [2, 3, 9])
def test_each_training_step_equals_a_draft_step(kind: str, length: int) -> None:
    """Rotations are made in float32, and the two count their places from another start."""
    head = fresh_head(kind)
    found = drafted_logits(head, TEXT[:length], TEXT[length : length + head.num_steps])
    expected = unrolled_logits(head, TEXT, length)
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)


@every_head
def test_drafts_after_any_rounds_equal_training(kind: str) -> None:
    assert drafts_as_it_learned(kind)


@every_head
def test_a_head_in_bfloat16_reads_states_in_float32(kind: str) -> None:
    """Mamba 2 keeps its states in float32."""
    head = fresh_head(kind, torch.bfloat16)
    runtime = FeatureRuntime(head, context_length=32, device=torch.device("cpu"))
    states = {layer: torch.randn(5, head.layer_config.width) for layer in head.hidden_layers}
    rounded = {layer: state.bfloat16() for layer, state in states.items()}
    assert torch.equal(runtime.features(states), runtime.features(rounded))


@every_head
def test_later_tokens_do_not_affect_the_logits(kind: str) -> None:
    head = fresh_head(kind)
    changed = [*TEXT[:-3], *(30 - token for token in TEXT[-3:])]
    ours, theirs = (head.unroll(lesson_of(torch.tensor([text]), target_model())) for text in (TEXT, changed))
    for depth, (one, other) in enumerate(zip(ours, theirs, strict=True)):
        # The thought of place j has read tokens up to j + 1 + depth.
        num_same = len(TEXT) - 3 - 1 - depth
        assert torch.equal(one[:, :num_same], other[:, :num_same])
        assert not torch.equal(one, other)


@every_head
def test_acceptance_is_counted_by_depth_at_the_counted_positions(kind: str) -> None:
    head = fresh_head(kind)
    model = target_model()
    training_batch = lesson_of(torch.tensor([TEXT]), model)
    training_batch.counts[:] = False
    training_batch.counts[0, 6] = True
    marks = head.learn(training_batch, target_of(), cross_entropy)
    target_logits = model(torch.tensor([TEXT])).logits[0, 5]
    known = head.vocabulary.select(torch.arange(31))
    for depth, (loss, accepted) in enumerate(zip(marks.losses, marks.accepted, strict=True)):
        # The token at 6 is guessed at this depth by the chain whose root is that much earlier.
        own = drafted_logits(head, TEXT[: 6 - depth], TEXT[6 - depth : 7])[depth]
        target_probs = target_logits.float().softmax(-1)[known]
        expected, shared = cross_entropy(target_probs, own[known])
        torch.testing.assert_close(loss.detach(), expected, atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(accepted, shared.to(accepted.dtype), atol=1e-5, rtol=1e-5)
        assert not accepted.requires_grad


@every_head
def test_training_lowers_the_loss(kind: str) -> None:
    model = target_model(torch.float32)
    target = target_of(torch.float32)
    head = fresh_head(kind, torch.float32).train()
    generator = torch.Generator().manual_seed(0)
    training_batch = lesson_of(torch.randint(31, (8, 24), generator=generator), model)
    optimiser = torch.optim.Adam(head.parameters(), lr=1e-3)
    history = []
    for _ in range(30):
        marks = head.learn(training_batch, target, cross_entropy)
        loss = torch.stack(marks.losses).sum()
        history.append([float(each.detach()) for each in marks.losses])
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
    assert all(last < first - 0.1 for first, last in zip(history[0], history[-1], strict=True))
    assert all(parameter.grad is not None for parameter in head.parameters() if parameter.requires_grad)


@every_head
def test_short_texts_train_only_the_first_depths(kind: str) -> None:
    training_batch = lesson_of(torch.tensor([TEXT[:4]]), target_model())
    marks = fresh_head(kind).learn(training_batch, target_of(), cross_entropy)
    assert [float(loss.detach()) > 0 for loss in marks.losses] == [True, True, False, False]


@pytest.mark.parametrize("width", [256, 96, 24, 6])
def test_a_layer_supports_any_width(width: int) -> None:
    shape = default_layer_config(width)
    assert shape.num_heads * shape.head_size == width
