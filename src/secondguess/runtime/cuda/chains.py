"""Chains of a draft model, drawn by graphs of several passes and draws each."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from secondguess.errors import SecondGuessError
from secondguess.runtime.chains import ChainDecision, ChainRequest, DrawnChains
from secondguess.runtime.cuda.capture import ROWS, Graph, GraphCache, StaticInputs, bucket
from secondguess.runtime.cuda.draws import Draws, Modes, draw_nodes, draw_parameters
from secondguess.runtime.cuda.operations import PassInputs
from secondguess.runtime.cuda.queries import RowQueries, fields_of
from secondguess.runtime.finite import require_finite
from secondguess.runtime.slots import CachedRow
from secondguess.runtime.system.machine import without_gradients

MAX_CATCH_UP = 2
"""Largest number of uncached tokens with which a chain is drawn at once: a draft that was accepted whole leaves two."""
MAX_DRAWN_BYTES = 2**27
"""Largest size of the logits and probabilities that a graph returns which draws more than one node."""
SEGMENT = 4
"""Largest number of nodes that one graph draws, after which the host decides whether to continue."""
UNDECIDED_SEGMENT = 8
"""The same where there is nothing to decide."""


class DrawingPass(NamedTuple):
    """Captured passes of a draft model that draw several nodes.

    Args:
        static: its inputs, as `draw_nodes` takes them.
        graph: returns the drawn nodes.
    """

    static: StaticInputs
    graph: Graph[Draws]


class ChainModel(NamedTuple):
    """Parts of a runtime by which chains are drawn.

    Args:
        graphs: of the runtime.
        reserve: makes room in the cache for a slot and a number of positions.
        run: runs a pass and returns its logits `[token, vocab]`. The graphs of the runtime keep it, so it does not hold the
            runtime.
        device: of the runtime.
        context_length: of the model.
    """

    graphs: GraphCache
    reserve: Callable[[int, int], None]
    run: Callable[[PassInputs], Tensor]
    device: torch.device
    context_length: int


def draw_chains(
    model: ChainModel,
    states: Sequence[CachedRow],
    requests: Sequence[ChainRequest],
    keep_drafting: ChainDecision,
) -> DrawnChains | None:
    """Draw chains after the tokens of rows; None if they are too many, or memory does not hold the graphs.

    Nodes are drawn before it is decided whether to draft them, which does not change their distribution: no decision
    depends on a token, and none on what follows it.
    """
    if len(states) > ROWS[-1]:
        return None
    modes = Modes.from_requests(requests)
    longest = _segment(len(states), requests[0].vocab_size, keep_drafting is not None)
    chains: list[list[int]] = [[] for _ in states]
    probs: list[list[Tensor]] = [[] for _ in states]
    active = list(range(len(states)))
    while active:
        depth = len(chains[active[0]])
        count = min(longest, *(requests[index].num_nodes - depth for index in active))
        try:
            drawn = _draw_segment(
                model,
                [states[index] for index in active],
                [chains[index] for index in active],
                [requests[index] for index in active],
                count,
                modes,
            )
        except torch.OutOfMemoryError:  # without graphs there may be room for these passes
            model.graphs.clear()
            if depth == 0:
                return None
            break
        tokens, confidences = drawn.on_host()
        _require_confidences(drawn, confidences, len(active))
        kept = None if drawn.probs is None else drawn.probs.clone()  # the next segment overwrites them
        open_rows = dict(enumerate(active))
        for node in range(count):
            for number, index in open_rows.items():
                chains[index].append(tokens[node][number])
                if kept is not None:
                    probs[index].append(kept[node, number])
            open_numbers = [
                number for number, index in open_rows.items() if depth + node + 1 < requests[index].num_nodes
            ]
            if open_numbers and keep_drafting is not None:
                # Rows that ended in this segment are asked about, too, but their answers do not count.
                in_batch = slice(len(active))
                continues = keep_drafting(
                    active, drawn.logits[node, in_batch], depth + node, confidences[node][in_batch]
                )
                open_numbers = [number for number in open_numbers if continues[number]]
            open_rows = {number: open_rows[number] for number in open_numbers}
        active = list(open_rows.values())
    return DrawnChains(chains, None if modes.all_greedy else _padded(probs))


def _padded(dists: Sequence[Sequence[Tensor]]) -> Tensor:
    """Stack distributions of the nodes of rows to `[row, node, vocab]`, with zeros beyond a row's nodes."""
    nothing = torch.zeros_like(dists[0][0])
    longest = max(map(len, dists))
    return torch.stack([torch.stack([*own, *[nothing] * (longest - len(own))]) for own in dists])


def _segment(num_rows: int, vocab_size: int, decides: bool) -> int:
    """Return the largest number of nodes that one graph draws."""
    node_bytes = 2 * 4 * bucket(num_rows, ROWS) * vocab_size  # of logits and probabilities
    return max(1, min(SEGMENT if decides else UNDECIDED_SEGMENT, MAX_DRAWN_BYTES // node_bytes))


def _draw_segment(
    model: ChainModel,
    states: Sequence[CachedRow],
    chains: Sequence[Sequence[int]],
    requests: Sequence[ChainRequest],
    count: int,
    modes: Modes,
) -> Draws:
    """Run a graph that draws `count` nodes after the nodes of each row so far."""
    depth, vocab_size = len(chains[0]), requests[0].vocab_size
    queries = [
        RowQueries(state.slot, state.length, state.row.tokens[state.length :])
        if not chain
        else RowQueries(state.slot, len(state.row.tokens) + depth - 1, chain[-1:])
        for state, chain in zip(states, chains, strict=True)
    ]
    size, width = bucket(len(queries), ROWS), max(len(row.tokens) for row in queries)
    model.reserve(
        max(row.slot for row in queries), max(row.start + len(row.tokens) for row in queries) + count
    )
    fields = fields_of(queries, size, width, model.context_length)
    nums_read = [len(row.tokens) for row in queries] + [1] * (size - len(queries))
    integers, floats = draw_parameters(requests, nums_read, range(depth, depth + count), modes)
    run = model.run  # without the rest of the model, as the graph keeps it

    def make() -> DrawingPass:
        static = StaticInputs(size, width, model.device, len(integers), len(floats))
        # Capturing runs the passes, which must write to the right places.
        static.set(fields, integers, floats)
        graph = model.graphs.capture(lambda: draw_nodes(run, static, count, vocab_size, modes=modes))
        return DrawingPass(static, graph)

    with without_gradients():
        drawing = model.graphs.get((size, width, count, modes, vocab_size), make)
        drawing.static.set(fields, integers, floats)
        return drawing.graph()


def can_draw(requests: Sequence[ChainRequest], vocab_size: int) -> bool:
    """Return whether graphs of a model with this vocabulary draw chains with these settings."""
    samples = [request for request in requests if request.settings.temperature > 0]
    return (
        all(request.vocab_size <= vocab_size and request.vocabulary is None for request in requests)
        and not any(request.settings.truncates for request in samples)
        and len({request.noise.races for request in samples}) < 2
    )


def _require_confidences(drawn: Draws, confidences: Sequence[Sequence[float]], num_rows: int) -> None:
    """Raise an error if a confidence is NaN."""
    if any(math.isnan(each) for node_confidences in confidences for each in node_confidences[:num_rows]):
        require_finite(drawn.logits, "the drafter")
        raise SecondGuessError(
            "expected a finite logit from the draft model, got none; its weights are broken, or overflow in this "
            "precision: try another dtype or another draft model"
        )
