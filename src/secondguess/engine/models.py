"""Models that decode together, with the batch that all calls and requests share."""

from __future__ import annotations

from functools import partial

from secondguess.checkpoint import memory
from secondguess.checkpoint.loaded import LoadedModel
from secondguess.controllers.base import Controller
from secondguess.decode import Components
from secondguess.drafters.base import Drafter
from secondguess.engine.shared_batch import SharedBatch
from secondguess.errors import BadInputError
from secondguess.runtime.cached import CachedRuntime
from secondguess.verifiers.base import Verifier

MAX_ROWS = 256
"""Maximum number of rows that decode at the same time; each adds a copy of the logits."""
PROBS_BYTES = 128
"""Bytes per row and token of the vocabulary: logits and probabilities of about ten nodes."""
MEMORY_SHARE = 0.7
"""Share of the available memory that caches and probabilities may take; they are copied to grow."""


class Models:
    """Target with a drafter, a verifier and a controller, ready to generate.

    Args:
        target: model whose distribution the output follows, with its tokenizer and load settings.
        drafter: proposes draft tokens.
        verifier: decides which draft tokens are accepted.
        controller: chooses the draft lengths.
        cache_bytes: KV cache bytes per token, over all models; 0 skips the memory check.
        share_history: draft from recent outputs of other calls, too (`Row.history`).
    """

    def __init__(
        self,
        target: LoadedModel,
        drafter: Drafter | None = None,
        verifier: Verifier | None = None,
        controller: Controller | None = None,
        cache_bytes: int = 0,
        share_history: bool = False,
    ) -> None:
        if drafter is None or verifier is None or controller is None or isinstance(drafter, str):
            raise BadInputError(
                f"expected loaded parts, got {target!r:.60}; load a model by secondguess.load(MODEL, DRAFTER, ...)"
            )
        self.cache_bytes = cache_bytes
        self.share_history = share_history
        self.target = target
        self.drafter = drafter
        self.verifier = verifier
        self.controller = controller
        components = Components(target.runtime, drafter, verifier, controller)
        self.shared_batch = SharedBatch(
            components, partial(fits_memory, target.runtime, cache_bytes), MAX_ROWS
        )


def fits_memory(runtime: CachedRuntime, cache_bytes: int, num_rows: int, longest: int) -> bool:
    """Return whether `num_rows` rows of up to `longest` tokens can decode together.

    Rows count with the length that they may reach, `max_tokens` included: a row that decodes keeps
    its entries until it ends, so memory that it may need later cannot be given to another.
    """
    available = memory.available_memory(runtime.device)
    if available is None:
        return True
    cached = runtime.num_tokens_to_allocate(num_rows, longest) * cache_bytes
    return cached + num_rows * runtime.vocab_size * PROBS_BYTES <= MEMORY_SHARE * available
