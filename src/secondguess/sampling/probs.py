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
import warnings
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import lru_cache

import torch
from torch import Tensor

from secondguess.core import Commit, Draft, Row, TokenLogprob
from secondguess.errors import BadInputError, MismatchWarning, SecondGuessError
from secondguess.params import SamplingParams
from secondguess.runtime.finite import are_finite, require_finite
from secondguess.sampling.penalties import LogitProcessors
from secondguess.sampling.truncation import Rule, make_rule, most_likely


def compute_target_probs(logits: Tensor, rows: Sequence[Row], draft: Draft) -> Tensor:
    """Return the target's probabilities `[row, node + 1, vocab]` after sampling settings, each query with its own prefix.

    They have the dtype of the logits, which are not modified, or float32 for half precision. Settings that ban every
    token raise a BadInputError, logits that are not finite a SecondGuessError.
    """
    dists = _probs(logits, rows, draft.tokens, _ancestors_of(draft))
    if _has_nan(dists):
        raise _no_token_error(logits)
    return dists


def compute_greedy_tokens(logits: Tensor, rows: Sequence[Row], draft: Draft) -> list[list[int]]:
    """Return the target's most likely token at each query, per row, for rows at temperature 0.

    The one-hot distributions of `compute_target_probs` are not built; arguments and errors are the same.
    """
    edits, _ = _settings(rows, logits)
    scores = _edited(logits, edits, rows, draft.tokens, _ancestors_of(draft))
    ids = most_likely(scores)
    are_finite = scores.gather(-1, ids[..., None]).isfinite().all()
    # one copy, which waits for a device once
    *tokens, is_valid = torch.cat((ids.flatten(), are_finite[None])).tolist()
    if not is_valid:
        raise _no_token_error(logits)
    num_queries = ids.shape[1]
    return [tokens[first : first + num_queries] for first in range(0, len(tokens), num_queries)]


def compute_draft_probs(
    logits: Tensor, rows: Sequence[Row], drafted: Tensor
) -> tuple[Tensor, list[bool] | None]:
    """Return the probabilities `[row, vocab]` from which a chain drafter draws its next node, per row.

    `logits` `[row, vocab]` follow the rows' tokens and the nodes `drafted` `[row, i]` so far, which penalties count; they
    are not modified. Their vocabulary can be larger or smaller than the target's; settings for missing tokens do not apply.

    The second result tells for each row whether no token is possible: a narrower vocabulary may lack all that the settings
    allow, and logits may be NaN or infinite. Such a row has the one-hot distribution of token 0. None if there is none.
    """
    dists = _probs(
        logits[:, None], rows, drafted, lambda: torch.ones_like(drafted, dtype=torch.bool)[:, None]
    )
    dists, banned = _without_banned(dists, logits)
    return dists[:, 0], None if banned is None else banned[:, 0].tolist()


def compute_tree_draft_probs(
    logits: Tensor, rows: Sequence[Row], draft: Draft
) -> tuple[Tensor, Tensor | None]:
    """Return the probabilities from which a tree drafter draws the children of each query.

    As `compute_draft_probs`, for logits `[row, node + 1, vocab]` at all queries of a draft; the
    second result is `[row, node + 1]` bool, True where no token is possible.
    """
    return _without_banned(_probs(logits, rows, draft.tokens, _ancestors_of(draft)), logits)


def _probs(logits: Tensor, rows: Sequence[Row], nodes: Tensor, visible: Callable[[], Tensor]) -> Tensor:
    """Return probabilities `[row, query, vocab]`, NaN where no token is possible.

    Arguments as in `LogitProcessors.apply`.
    """
    edits, rule = _settings(rows, logits)
    return rule(_edited(logits, edits, rows, nodes, visible))


def _settings(rows: Sequence[Row], logits: Tensor) -> tuple[LogitProcessors, Rule]:
    return _setting_tensors(tuple([row.params for row in rows]), logits.shape[-1], logits.device)


def _edited(
    logits: Tensor,
    edits: LogitProcessors,
    rows: Sequence[Row],
    nodes: Tensor,
    visible: Callable[[], Tensor],
) -> Tensor:
    """Return logits after all settings but temperature, top-k, top-p and min-p."""
    scores = at_least_float32(logits)
    return edits.apply(scores, rows, nodes, visible()) if edits.change_logits(rows) else scores


def _ancestors_of(draft: Draft) -> Callable[[], Tensor]:
    """Return the function that computes which nodes precede each query; none precede query 0."""
    return lambda: torch.nn.functional.pad(draft.ancestors(), (0, 0, 1, 0))


def _without_banned(dists: Tensor, logits: Tensor) -> tuple[Tensor, Tensor | None]:
    """Replace undefined distributions by the one-hot one of token 0; return also where they were."""
    if not _has_nan(dists):
        return dists, None
    warn_unless_finite(logits)
    banned = dists[..., 0].isnan()
    first = torch.nn.functional.one_hot(torch.zeros_like(banned, dtype=torch.long), dists.shape[-1])
    return torch.where(banned[..., None], first.to(dists.dtype), dists), banned


def warn_unless_finite(logits: Tensor) -> None:
    """Warn of a drafter's logits that are NaN or infinite, after which nothing is drafted."""
    if not are_finite(logits):
        warnings.warn(
            "the drafter's logits are NaN or infinite after some texts, where it drafts nothing: the output stays correct, "
            "but few tokens are drafted; its weights are broken, or overflow in this precision: try another dtype",
            MismatchWarning,
            stacklevel=2,
        )


def commit_logprobs(commit: Commit, logits: Tensor, index: int, path: Sequence[int]) -> Commit:
    """Return a commit with log-probabilities if its request asks for them: log-softmax, before any sampling setting.

    `logits` are `[row, node + 1, vocab]`, with the commit's row at `index`. Token 0 of the commit follows query 0, token i
    follows node `path[i - 1]`.
    """
    num_alternatives = commit.row.params.logprobs
    if num_alternatives is None:
        return commit
    queries = [0, *(node + 1 for node in path)][: len(commit.tokens)]
    return replace(commit, logprobs=token_logprobs(logits[index, queries], commit.tokens, num_alternatives))


def token_logprobs(logits: Tensor, tokens: Sequence[int], num_alternatives: int) -> list[TokenLogprob]:
    """Return log-probabilities of tokens, each with its most probable alternatives, from logits `[token, vocab]`."""
    logits = at_least_float32(logits)
    sums = logits.logsumexp(-1, keepdim=True)
    own = logits.gather(1, torch.tensor(tokens, device=logits.device)[:, None]) - sums
    top = logits.topk(min(num_alternatives, logits.shape[-1]))
    alternatives = [
        {token: value for token, value in zip(ids, values, strict=True) if value > -math.inf}
        for ids, values in zip(top.indices.tolist(), (top.values - sums).tolist(), strict=True)
    ]
    reports = zip(tokens, own[:, 0].tolist(), alternatives, strict=True)
    return [TokenLogprob(*report) for report in reports]


@lru_cache(maxsize=256)
def _setting_tensors(
    params: tuple[SamplingParams, ...], vocab_size: int, device: torch.device
) -> tuple[LogitProcessors, Rule]:
    """Convert settings to tensors; cached while the same requests decode together."""
    return LogitProcessors.from_params(params, vocab_size, device), make_rule(params, device)


def at_least_float32(logits: Tensor) -> Tensor:
    """Return logits in float32, or unchanged in float64."""
    return logits if logits.dtype == torch.float64 else logits.float()


def _has_nan(dists: Tensor) -> bool:
    # An undefined distribution is NaN in every entry, and one NaN makes the sum below NaN.
    if not dists.is_cpu:
        return math.isnan(dists[..., 0].sum().item())
    # NumPy takes a quarter of torch's time for so few numbers.
    first = dists.numpy()[..., 0]
    return math.isnan(first.item() if first.size == 1 else first.sum())


def _no_token_error(logits: Tensor) -> SecondGuessError:
    require_finite(logits)
    return BadInputError(
        "expected at least one possible token, got settings that ban every token; "
        "relax logit_bias, min_tokens or grammar"
    )
