"""Heads that read their own hidden states: training and drafting must give the same logits at a position."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache, partial

import torch
from torch import Tensor
from transformers import LlamaForCausalLM

from checkpoints import random_llama
from secondguess.controllers import make_controller
from secondguess.core import Row
from secondguess.decode import Components, decode
from secondguess.drafters.eagle import EagleDrafter
from secondguess.drafters.sampling_drafter import SamplingDrafter
from secondguess.heads.base import DraftVocabulary, TargetModel
from secondguess.heads.eagle import Eagle1Head, EagleHead
from secondguess.heads.feature import FeatureHead, initialise
from secondguess.heads.learning import TrainingBatch
from secondguess.heads.mtp import MtpHead
from secondguess.runtime.base import HiddenStates
from secondguess.runtime.modules.transformers import TransformersRuntime
from secondguess.sampling import SamplingParams
from secondguess.verifiers import make_verifier

VOCAB_SIZE = 31
WIDTH = 32
NUM_LAYERS = 4
TEXT = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8, 9, 7, 9, 3, 2, 3, 8, 4]


@cache
def target_model(dtype: torch.dtype = torch.float64) -> LlamaForCausalLM:
    """A target whose distributions are neither flat nor one-hot."""
    sizes = {"hidden_size": WIDTH, "intermediate_size": 48, "num_hidden_layers": NUM_LAYERS}
    model = random_llama(vocab_size=VOCAB_SIZE, bos_token_id=None, eos_token_id=None, **sizes)
    return model.to(dtype).requires_grad_(False)


def lesson_of(tokens: Tensor, model: LlamaForCausalLM) -> TrainingBatch:
    """Return a training batch of texts `[row, position]`; all tokens but the first two are counted."""
    with torch.no_grad():
        states = model(tokens, output_hidden_states=True).hidden_states
    hidden: HiddenStates = {**dict(enumerate(states)), -1: states[-1]}
    counts = torch.ones_like(tokens, dtype=torch.bool)
    counts[:, :2] = False
    return TrainingBatch(tokens, counts, hidden)


def target_of(dtype: torch.dtype = torch.float64) -> TargetModel:
    return TargetModel.from_runtime(TransformersRuntime(target_model(dtype)))


def make_eagle3(target: TargetModel) -> FeatureHead:
    vocabulary = DraftVocabulary.most_frequent(torch.arange(VOCAB_SIZE) % 11, 24)
    return EagleHead.fresh(target, seed=1, vocabulary=vocabulary)


def make_eagle3_with_windows(target: TargetModel) -> FeatureHead:
    """Return a head whose second layer has a window that is shorter than a chain."""
    head = EagleHead.fresh(target, seed=1)
    config = replace(head.config, num_layers=3, windows=(4, 2, None))
    head = EagleHead(config, target, has_head=False)
    initialise(head, 1)
    return head


UNROLLED: dict[str, Callable[[TargetModel], FeatureHead]] = {
    "eagle3": make_eagle3,
    "eagle3, windows": make_eagle3_with_windows,
    "eagle1": partial(Eagle1Head.fresh, seed=1),
    "mtp": partial(MtpHead.fresh, seed=1),
}
"""Kind -> an untrained head for `target_model`."""


def fresh_head(kind: str, dtype: torch.dtype = torch.float64) -> FeatureHead:
    return UNROLLED[kind](target_of(dtype)).to(dtype)


def told(drafter: SamplingDrafter, row: Row, tokens: list[int]) -> Tensor:
    """Return the logits `[depth, vocab]` of a drafter whose chain consists of the given tokens."""
    said = []
    with torch.inference_mode():
        drafter.prepare([row], [0])
        for token in tokens:
            said.append(drafter.chain_logits([row], [0])[0])
            drafter.extend([row], [0], [token])
    return torch.stack(said).clone()


def drafted_logits(head: FeatureHead, prompt: list[int], continuation: list[int]) -> Tensor:
    """Return the logits `[depth, vocab]` after a prompt, with the given continuation as the chain."""
    target = TransformersRuntime(target_model())
    drafter = EagleDrafter(head, target, "head")
    row = Row(list(prompt), SamplingParams())
    target.request_hidden_states(drafter.hidden_layers)
    drafter.begin([row], target.begin([row]))
    return told(drafter, row, continuation)


def unrolled_logits(head: FeatureHead, tokens: list[int], length: int) -> Tensor:
    """Return the logits `[depth, vocab]` of a text in training, after its first `length` tokens."""
    training_batch = lesson_of(torch.tensor([tokens]), target_model())
    with torch.no_grad():
        return torch.stack([head.logits(thought[0, length - 2]) for thought in head.unroll(training_batch)])


def drafts_as_it_learned(kind: str) -> bool:
    """Return whether each depth has the logits of training, after rounds with accepted and rejected nodes."""
    head = fresh_head(kind)
    target = TransformersRuntime(target_model())
    drafter = EagleDrafter(head, target, "head")
    row = Row(TEXT[:5], SamplingParams(temperature=1.0, max_tokens=40), seed=3)
    rounds = decode(Components(target, drafter, make_verifier("auto"), make_controller("fixed:3")), [row])
    num_accepted = [next(rounds)[0].num_accepted for _ in range(5)]
    assert max(num_accepted) > 0 == min(num_accepted)
    told_next = [7, 2, 20, 11]
    found = told(drafter, row, told_next)
    expected = unrolled_logits(head, row.tokens + told_next, len(row.tokens))
    rounds.close()
    return torch.allclose(found, expected, atol=1e-5)
