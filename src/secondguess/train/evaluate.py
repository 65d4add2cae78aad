"""What a trained pair is worth: bits per byte, and how often the drafter's guesses would be accepted."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass

import torch
from torch import Tensor
from torch.nn import functional

from secondguess.errors import BadInputError
from secondguess.train.generate import RowGenerator
from secondguess.train.losses import overlap
from secondguess.train.model import Decoder
from secondguess.train.tokens import TokenStore


@dataclass(frozen=True)
class Acceptance:
    """Expected acceptance of one drafted token, averaged over positions of one kind of text."""

    greedy: float
    sampled: float
    positions: int


@dataclass(frozen=True)
class PairFigures:
    """The measured numbers of a pair, as the model cards state them."""

    target_bits_per_byte: float
    drafter_bits_per_byte: float
    held_out: Acceptance
    own_greedy: Acceptance
    own_sampled: Acceptance

    def as_dict(self) -> dict[str, object]:
        return asdict(self)


@torch.no_grad()
def bits_per_byte(decoder: Decoder, store: TokenStore, rows: int = 256, length: int = 512) -> float:
    """Held-out cross-entropy in bits per byte of text, over evenly spaced windows."""
    batch = store.held_out_batch(rows, length)
    total = 0.0
    for part in torch.split(batch, 8):
        logits = decoder(part[:, :-1]).float()
        total += float(functional.cross_entropy(logits.flatten(0, 1), part[:, 1:].flatten(), reduction="sum"))
    return total / (len(batch) * length) / math.log(2) / store.bytes_per_token


@torch.no_grad()
def acceptance(target: Decoder, drafter: Decoder, rows: Tensor, first: int = 0) -> Acceptance:
    """Agreement of the two models on ``rows``, counted from position ``first`` (where a prompt ends)."""
    if rows.shape[1] - first < 1:
        raise BadInputError(f"rows of {rows.shape[1]} tokens leave nothing to measure after position {first}")
    greedy = sampled = 0.0
    positions = 0
    for part in torch.split(rows, 8):
        target_logits, draft_logits = target(part)[:, first:].float(), drafter(part)[:, first:].float()
        greedy += float((target_logits.argmax(-1) == draft_logits.argmax(-1)).sum())
        sampled += float(overlap(target_logits, draft_logits).sum())
        positions += target_logits[..., 0].numel()
    return Acceptance(greedy / positions, sampled / positions, positions)


def measure_pair(
    target: Decoder, drafter: Decoder, store: TokenStore, *, rows: int = 64, seed: int = 0
) -> PairFigures:
    """All figures of the model cards: on held-out text and, what decides speed, on the target's own text."""
    generator = torch.Generator().manual_seed(seed)
    prompts = store.held_out_batch(rows, 64)[:, :64]
    own = {
        temperature: RowGenerator(target, len(prompts), 192).run(prompts, 128, temperature, generator)
        for temperature in (0.0, 1.0)
    }
    return PairFigures(
        bits_per_byte(target, store),
        bits_per_byte(drafter, store),
        acceptance(target, drafter, store.held_out_batch(rows, 256)[:, :-1]),
        acceptance(target, drafter, own[0.0], first=63),
        acceptance(target, drafter, own[1.0], first=63),
    )
