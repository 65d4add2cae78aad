"""Which of a target's layers can be spared in a draft: a search over one's own text, without training (SWIFT, arXiv 2410.06916).

The target reads its text once; a candidate reads it without some layers, and how much their laws overlap says how often its
nodes would be accepted. From there a candidate's worth is arithmetic: tokens per pass over time per pass at the best draft
length (section 1.2 of Leviathan et al., 2211.17192), its cost being its share of the weights that a pass reads.

The search drops one layer at a time, always the one that leaves the most worth, until one is left, and then lets pairs of
layers change places as long as that pays.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from torch import Tensor

from secondguess.errors import BadInputError
from secondguess.heads.skip import write_skipped
from secondguess.runtime.fused import FusedRuntime
from secondguess.train.losses import overlap

MOST_NODES = 12
Report = Callable[[str], None]


@dataclass(frozen=True)
class Candidate:
    """Layers to leave out, and what that is expected to bring.

    Args:
        skipped: counted from 0, rising.
        acceptance: mean overlap of the two laws on the target's own text.
        cost_ratio: of a draft step, by weights read.
        draft_length: the best.
        speedup: over plain decoding, if a pass over several tokens takes as long as over one.
    """

    skipped: tuple[int, ...]
    acceptance: float
    cost_ratio: float
    draft_length: int
    speedup: float


def best_draft_length(acceptance: float, cost_ratio: float) -> tuple[int, float]:
    """Nodes per round, and the speed-up that they bring where each is accepted with the same chance.

    >>> best_draft_length(0.8, 0.1)[0]
    6
    """
    speeds = []
    for length in range(MOST_NODES + 1):
        tokens = sum(acceptance**depth for depth in range(length + 1))
        speeds.append((tokens / (length * cost_ratio + 1), -length))
    speed, negative = max(speeds)
    return -negative, speed


class SkipSearch:
    """Weighs candidates on some texts of the target.

    Args:
        target: in the fused runtime, no row in its cache.
        texts: `[row, position]` int64, texts that the target wrote, of one length.
    """

    def __init__(self, target: FusedRuntime, texts: Tensor) -> None:
        if target.num_layers < 2:
            raise BadInputError(
                f"expected a target of at least 2 layers to leave some out, got {target.num_layers}"
            )
        self._target = target
        self._texts = texts
        self._expected = target.read(texts).logits
        self._known: dict[tuple[int, ...], Candidate] = {}

    def candidate(self, skipped: Sequence[int]) -> Candidate:
        """What leaving these layers out is worth."""
        key = tuple(sorted(skipped))
        if key not in self._known:
            logits = self._target.without_layers(key).read(self._texts).logits
            acceptance = float(overlap(self._expected, logits).mean())
            cost = self._cost_ratio(key)
            self._known[key] = Candidate(key, acceptance, cost, *best_draft_length(acceptance, cost))
        return self._known[key]

    @property
    def num_tried(self) -> int:
        """Candidates weighed so far."""
        return len(self._known)

    def _cost_ratio(self, skipped: Sequence[int]) -> float:
        decoder = self._target.decoder
        layers = [
            sum(product.weight.numel() for product in (layer.joint, layer.output, layer.gate_up, layer.down))
            for layer in decoder.layers
        ]
        head = decoder.head.weight.numel()
        spared = sum(layers[index] for index in skipped)
        return (sum(layers) + head - spared) / (sum(layers) + head)

    def run(self, report: Report) -> Candidate:
        """The best found."""
        num_layers = self._target.num_layers
        chosen = min((self.candidate([layer]) for layer in range(num_layers)), key=_by_worth)
        best = chosen
        while len(chosen.skipped) < num_layers - 1:
            left = [layer for layer in range(num_layers) if layer not in chosen.skipped]
            chosen = min((self.candidate([*chosen.skipped, layer]) for layer in left), key=_by_worth)
            report(f"without {len(chosen.skipped)} layers: {_in_words(chosen)}")
            best = min(best, chosen, key=_by_worth)
        return self._with_changes(best, report)

    def _with_changes(self, best: Candidate, report: Report) -> Candidate:
        """Let a skipped and a kept layer change places while that pays."""
        while True:
            kept = [layer for layer in range(self._target.num_layers) if layer not in best.skipped]
            changed = [
                self.candidate([*(layer for layer in best.skipped if layer != back), out])
                for back in best.skipped
                for out in kept
            ]
            better = min([best, *changed], key=_by_worth)
            if better is best:
                return best
            best = better
            report(f"changed places: {_in_words(best)}")


def _by_worth(candidate: Candidate) -> tuple[float, tuple[int, ...]]:
    return -candidate.speedup, candidate.skipped


def _in_words(candidate: Candidate) -> str:
    skipped = "-".join(map(str, candidate.skipped))
    return (
        f"{skipped}: {candidate.acceptance:.1%} accepted, c = {candidate.cost_ratio:.2f}, "
        f"{candidate.speedup:.2f}x at {candidate.draft_length} nodes"
    )


def save_layers(candidate: Candidate, folder: Path) -> None:
    """Write what the drafter `layer-skip:FOLDER` reads."""
    write_skipped(folder, candidate.skipped, asdict(candidate))


def one_length(texts: Sequence[Sequence[int]], length: int) -> Tensor:
    """The beginnings `[row, length]` of those texts that are long enough.

    Raises:
        BadInputError: none is.
    """
    long_enough = [list(text[:length]) for text in texts if len(text) >= length]
    if not long_enough:
        raise BadInputError(
            f"expected texts of at least {length} tokens to search on, got none; write longer ones"
        )
    return torch.tensor(long_enough)
