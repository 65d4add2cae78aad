"""Conversion of logits to probabilities.

All distributions in the package, the target's and the drafters', are computed here, in this order:

    logit bias, repetition penalty, frequency and presence penalty, ban of end tokens
    (`min_tokens`), grammar mask, temperature, top-k, top-p, min-p

Each query of a draft gets the distribution that plain decoding has after the same prefix:
penalties, `min_tokens` and grammar count a node's drafted ancestors as if they were committed. Speculation
would not be lossless otherwise.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import lru_cache

import torch
from torch import Tensor

from secondguess.core import Commit, Draft, Row, TokenLogprob
from secondguess.errors import BadInputError, SecondGuessError
from secondguess.sampling.params import SamplingParams
from secondguess.sampling.penalties import LogitProcessors
from secondguess.sampling.truncation import Rule, make_rule


def compute_target_probs(logits: Tensor, rows: Sequence[Row], draft: Draft) -> Tensor:
    """Return the target's probabilities after sampling settings, each query with its own prefix.

    Args:
        logits: `[row, node + 1, vocab]`; not modified.
        rows: their settings apply, and penalties count their tokens.
        draft: nodes whose queries are 1 and up.

    Returns:
        Probabilities `[row, node + 1, vocab]` in the logits' dtype (float32 for half precision).

    Raises:
        BadInputError: the settings ban every token.
        SecondGuessError: the model's logits are not finite.
    """
    # Query 0 follows `pending`: no drafted node precedes it.
    return _probs(
        logits, rows, draft.tokens, lambda: torch.nn.functional.pad(draft.ancestors(), (0, 0, 1, 0))
    )


def compute_draft_probs(logits: Tensor, rows: Sequence[Row], drafted: Tensor) -> Tensor:
    """Return the probabilities from which a chain drafter draws its next node, per row.

    Args:
        logits: `[row, vocab]` after the rows' tokens and `drafted`; not modified. The vocabulary
            can be larger or smaller than the target's; settings for missing tokens do not apply.
        rows: their settings apply, and penalties count their tokens.
        drafted: `[row, i]` nodes drawn so far in this round.

    Returns:
        Probabilities `[row, vocab]`; dtype and errors as in `compute_target_probs`.
    """
    return _probs(
        logits[:, None], rows, drafted, lambda: torch.ones_like(drafted, dtype=torch.bool)[:, None]
    )[:, 0]


def _probs(logits: Tensor, rows: Sequence[Row], nodes: Tensor, visible: Callable[[], Tensor]) -> Tensor:
    """Return probabilities `[row, query, vocab]`; arguments as in `LogitProcessors.apply`."""
    params = tuple([row.params for row in rows])
    edits, rule = _setting_tensors(params, logits.shape[-1], logits.device)
    scores = _at_least_float32(logits)
    if edits.change_logits(rows):
        scores = edits.apply(scores, rows, nodes, visible())
    return _check_finite(rule(scores), logits)


def commit_logprobs(commit: Commit, logits: Tensor, path: Sequence[int]) -> Commit:
    """Add log-probabilities to a commit if its request asks for them.

    Args:
        commit: tokens that the row gained.
        logits: `[node + 1, vocab]` of this row. Their log-softmax is reported, before any sampling
            setting.
        path: accepted nodes. Token 0 of the commit follows query 0, token i follows node
            `path[i - 1]`.

    Returns:
        The commit itself if the request asks for no log-probabilities, else a copy with them.
    """
    num_alternatives = commit.row.params.logprobs
    if num_alternatives is None:
        return commit
    queries = [0, *(node + 1 for node in path)][: len(commit.tokens)]
    logprobs = _at_least_float32(logits[queries]).log_softmax(-1)
    tokens = torch.tensor(commit.tokens, device=logits.device)
    own = logprobs.gather(1, tokens[:, None])[:, 0].tolist()
    top = logprobs.topk(min(num_alternatives, logprobs.shape[-1]))
    alternatives = [
        {token: value for token, value in zip(ids, values, strict=True) if value > -math.inf}
        for ids, values in zip(top.indices.tolist(), top.values.tolist(), strict=True)
    ]
    reports = zip(commit.tokens, own, alternatives, strict=True)
    return replace(commit, logprobs=[TokenLogprob(*report) for report in reports])


@lru_cache(maxsize=256)
def _setting_tensors(
    params: tuple[SamplingParams, ...], vocab_size: int, device: torch.device
) -> tuple[LogitProcessors, Rule]:
    """Convert settings to tensors; cached while the same requests decode together."""
    return LogitProcessors.of(params, vocab_size, device), make_rule(params, device)


def _at_least_float32(logits: Tensor) -> Tensor:
    return logits if logits.dtype in (torch.float32, torch.float64) else logits.float()


def _check_finite(dists: Tensor, logits: Tensor) -> Tensor:
    # An undefined distribution is NaN in every entry, and one NaN makes the sum below NaN.
    first = dists[..., 0]
    if math.isnan(first.item() if first.numel() == 1 else first.sum().item()):
        if bool(logits.isnan().any()) or bool((logits == math.inf).any()):
            raise SecondGuessError(
                "expected finite logits from the model, got NaN or infinity; its weights are broken, or "
                "overflow in this precision: try another dtype"
            )
        raise BadInputError(
            "expected at least one possible token, got settings that ban every token; "
            "relax logit_bias, min_tokens or grammar"
        )
    return dists
