"""Arguments and results of a call of the kernels that draws a chain."""

from __future__ import annotations

import ctypes
from array import array
from ctypes import c_int64

import torch
from torch import Tensor

from secondguess.errors import SecondGuessError
from secondguess.runtime.base import ChainRequest, DrawnChain
from secondguess.runtime.native import library
from secondguess.runtime.native.sampling import require_finite
from secondguess.runtime.native.verification import described_noise, described_settings

NOT_FINITE, INTERRUPTED = 3, 4
STOP, GO_ON = 1, 2


class ChainCall:
    """Chain that one call of the kernels draws; use it as a context around that call.

    Args:
        request: the request.
        logits: `[1, vocab]`, which the kernels compute at every node.

    Attributes:
        chain: the argument of the call.
        tokens: token of every node drawn.
    """

    def __init__(self, request: ChainRequest, logits: Tensor) -> None:
        num_nodes = request.num_nodes
        self._request, self._logits = request, logits
        self._errors: list[BaseException] = []
        self.tokens = (c_int64 * num_nodes)()
        self._probs = torch.empty(num_nodes, request.vocab_size) if request.settings.temperature else None
        self.chain = library.Chain(
            num_nodes=num_nodes,
            vocab_size=request.vocab_size,
            settings=described_settings(request.settings),
            noise=described_noise(request.noise),
            tokens=ctypes.addressof(self.tokens),
            probs=None if self._probs is None else self._probs.data_ptr(),
        )
        if request.vocabulary is not None:
            self.chain.target_ids = request.vocabulary.ids.data_ptr()
            self.chain.target_lengths = request.vocabulary.lengths.data_ptr()
        if request.stopping_rule is not None:
            self._groups = (c_int64 * num_nodes)()
            self._rule = self._describe_rule()
            self.chain.rule = ctypes.pointer(self._rule)

    def __enter__(self) -> ChainCall:
        if self._request.keep_drafting is not None:
            self.chain.keeps_drafting = library.KEEP_DRAFTING(self._decide)
        return self

    def __exit__(self, *_: object) -> None:
        self.chain.keeps_drafting = library.KEEP_DRAFTING()  # a reference cycle through this object

    def result(self, found: int) -> DrawnChain | None:
        """Return the drawn chain, given what the call returned; None if it failed like a single pass.

        Raises:
            KeyboardInterrupt: a signal interrupted the call.
            SecondGuessError: logits that are not finite.
        """
        if self._errors:
            raise self._errors[0]
        if found == -INTERRUPTED:  # by a signal, before the decision began: Python drops its exception
            raise KeyboardInterrupt
        if found == -NOT_FINITE:
            require_finite(self._logits)
            raise SecondGuessError(
                "expected a finite logit from the draft model, got none; its weights are broken"
            )
        if found < 0:
            return None
        rule = self._request.stopping_rule
        if rule is not None:
            is_whole = found == self._request.num_nodes or self._ends_text(self.tokens[found - 1])
            rule.groups.extend(self._groups[: found - is_whole])
        return DrawnChain(self.tokens[:found], None if self._probs is None else self._probs[:found])

    def _ends_text(self, token: int) -> bool:
        vocabulary = self._request.vocabulary
        return vocabulary is not None and not vocabulary.lengths[token]

    def _describe_rule(self) -> library.StoppingRule:
        rule = self._request.stopping_rule
        assert rule is not None
        if len(rule.least) < self._request.num_nodes - 1:
            raise SecondGuessError(
                f"expected a stopping rule for {self._request.num_nodes} nodes, got one for {len(rule.least) + 1}"
            )
        return library.StoppingRule(
            len(rule.edges),
            *map(_address, (rule.edges, rule.own, rule.following, rule.least)),
            ctypes.addressof(self._groups),
        )

    def _decide(self, depth: int, confidence: float) -> None:
        keep_drafting = self._request.keep_drafting
        assert keep_drafting is not None
        try:
            self.chain.answer = GO_ON if keep_drafting(self._logits, depth, confidence) else STOP
        except BaseException as error:  # it cannot pass through the kernels
            self._errors.append(error)


def _address(values: array[float]) -> int:
    return values.buffer_info()[0]
