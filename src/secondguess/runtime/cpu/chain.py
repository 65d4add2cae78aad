"""Arguments and results of a call of the kernels that draws chains."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from ctypes import Array, c_double, c_int64, c_uint64, sizeof
from functools import lru_cache

from torch import Tensor

from secondguess.errors import OutOfMemoryError, SecondGuessError
from secondguess.runtime.chains import ChainDecision, ChainRequest, DrawnChains, KernelSettings, RowNoise
from secondguess.runtime.cpu import library
from secondguess.runtime.finite import require_finite

NOT_FINITE, INTERRUPTED = 3, 4
STOP, CONTINUE = 1, 2


class ChainCall:
    """Chains that one call of the kernels draws; use it as a context around that call.

    Args:
        requests: one per row.
        decision: which chains continue (`Runtime.draft_chains`).
        logits: `[row, vocab]`, which the kernels compute at every node.

    Attributes:
        chains: the argument of the call.
    """

    def __init__(self, requests: Sequence[ChainRequest], decision: ChainDecision, logits: Tensor) -> None:
        num_rows, vocab_size = len(requests), requests[0].vocab_size
        self._num_nodes = num_nodes = max(request.num_nodes for request in requests)
        self._decision, self._logits, self._num_rows = decision, logits, num_rows
        self._errors: list[BaseException] = []
        is_sampled = any([request.settings.temperature for request in requests])
        self._settings = _settings_of_rows(tuple([request.settings for request in requests]))
        self._noises = noises_of_rows([request.noise for request in requests])
        self._confidences = (c_double * num_rows)()
        # One buffer: limits, answers and lengths of the rows, then tokens.
        self._numbers = (c_int64 * (num_rows * (3 + num_nodes)))(*[request.num_nodes for request in requests])
        limits = ctypes.addressof(self._numbers)
        answers, lengths, tokens = [limits + sizeof(c_int64) * num_rows * place for place in (1, 2, 3)]
        try:
            self._probs = library.float32_buffer(num_rows, num_nodes, vocab_size) if is_sampled else None
        except RuntimeError as error:
            raise OutOfMemoryError(
                f"expected memory for the probabilities of {num_rows} drafts of {num_nodes} tokens, got none; decode "
                "fewer rows at once"
            ) from error
        self.chains = library.Chains(
            num_nodes=num_nodes,
            vocab_size=vocab_size,
            limits=limits,
            settings=ctypes.addressof(self._settings),
            noises=ctypes.addressof(self._noises),
            confidences=ctypes.addressof(self._confidences),
            answers=answers,
            lengths=lengths,
            tokens=tokens,
            probs=None if self._probs is None else self._probs.data_ptr(),
        )
        self._vocabulary = requests[0].vocabulary
        if self._vocabulary is not None:
            self.chains.target_ids = self._vocabulary.ids.data_ptr()
            self.chains.target_lengths = self._vocabulary.lengths.data_ptr()

    @property
    def tokens(self) -> list[int]:
        """Token of every node drawn, `[row, node]` flattened."""
        return self._numbers[3 * self._num_rows :]

    def __enter__(self) -> ChainCall:
        if self._decision is not None:
            self.chains.keeps_drafting = library.KEEP_DRAFTING(self._decide)
        return self

    def __exit__(self, *_: object) -> None:
        self.chains.keeps_drafting = library.KEEP_DRAFTING()  # a reference cycle through this object

    def result(self, failure: int) -> DrawnChains | None:
        """Return the drawn chains, given what the call returned; None if it failed like a single pass.

        Errors of the decision are raised, and interruptions by a signal.
        """
        if self._errors:
            raise self._errors[0]
        if failure == -INTERRUPTED:  # by a signal, before the decision began: Python drops its exception
            raise KeyboardInterrupt
        if failure == -NOT_FINITE:
            require_finite(self._logits, "the drafter")
            raise SecondGuessError(
                "expected a finite logit from the draft model, got none; its weights are broken"
            )
        if failure:
            return None
        num_rows, tokens, width = self._num_rows, self.tokens, self._num_nodes
        lengths = self._numbers[2 * num_rows : 3 * num_rows]
        chains = [tokens[row * width : row * width + length] for row, length in enumerate(lengths)]
        return DrawnChains(chains, None if self._probs is None else self._probs[:, : max(lengths)])

    def _decide(self, depth: int) -> None:
        decide = self._decision
        assert decide is not None
        try:
            rows = range(self._num_rows)
            kept = decide(rows, self._logits, depth, self._confidences[:])
            answers = [CONTINUE if continues else STOP for continues in kept]
            self._numbers[len(rows) : 2 * len(rows)] = answers  # type: ignore[assignment]
        except BaseException as error:  # it cannot pass through the kernels
            self._errors.append(error)


def noises_of_rows(noises: Sequence[RowNoise]) -> Array[c_uint64]:
    """Return the noise of the rows of a batch as the kernels take it: three numbers per row."""
    numbers = [number for noise in noises for number in noise]
    return (c_uint64 * len(numbers))(*numbers)


@lru_cache(maxsize=256)
def _settings_of_rows(settings: tuple[KernelSettings, ...]) -> Array[library.Settings]:
    """Return the settings of the rows of a batch as the kernels take them; cached, as few occur."""
    return (library.Settings * len(settings))(
        *[library.Settings(row.temperature, row.truncates, *row[1:]) for row in settings]
    )
