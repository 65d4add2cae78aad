"""Fields and tensors that heads in the `speculators` format share.

The draft vocabulary is stored as two tensors: `d2t` holds, per draft token, the target id minus
the draft id; `t2d` marks the target tokens in the draft vocabulary.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from secondguess.errors import CheckpointError
from secondguess.heads.base import DraftVocabulary, TargetModel
from secondguess.heads.files import require_same, whole_number
from secondguess.heads.layer import LayerConfig
from secondguess.names import check_range


def speculators_fields(
    kind: str, num_tokens: int, target: str, architectures: Sequence[str] = ()
) -> dict[str, Any]:
    """Return the fields that name the kind of head, its draft length and its target."""
    proposal = {
        "proposal_type": "greedy",
        "speculative_tokens": num_tokens,
        "verifier_accept_k": 1,
        "accept_tolerance": 0.0,
    }
    return {
        "speculators_model_type": kind,
        "speculators_config": {
            "algorithm": kind,
            "default_proposal_method": "greedy",
            "proposal_methods": [proposal],
            "verifier": {"name_or_path": target, "architectures": list(architectures)},
        },
    }


def layer_fields(layer: LayerConfig, vocab_size: int, num_layers: int) -> dict[str, Any]:
    """Return the Llama-like configuration of a stack of decoder layers."""
    return {**layer.to_config(), "vocab_size": vocab_size, "num_hidden_layers": num_layers}


def pop_vocabulary(
    tensors: dict[str, Tensor],
    config: Mapping[str, Any],
    layer_config: Mapping[str, Any],
    target: TargetModel,
    folder: Path,
) -> DraftVocabulary:
    """Return the vocabulary of a checkpoint, and remove its maps from the tensors.

    Call it inside `config_errors`.

    Raises:
        CheckpointError: another vocabulary than the target's, or maps that are missing or do not
            describe one set of tokens.
    """
    vocab_size = whole_number(layer_config, "vocab_size")
    require_same("vocabulary", vocab_size, target.vocab_size, folder)
    size = whole_number({"draft_vocab_size": vocab_size, **config}, "draft_vocab_size")
    check_range("the draft vocabulary", size, 1, vocab_size)
    offsets, marks = tensors.pop("d2t", None), tensors.pop("t2d", None)
    if size == vocab_size:
        return DraftVocabulary(vocab_size)  # some checkpoints contain maps nevertheless
    if offsets is None or marks is None:
        raise CheckpointError(
            f"expected d2t and t2d in {folder}, whose draft vocabulary is smaller than the target's, "
            f"got no {'d2t' if offsets is None else 't2d'}"
        )
    token_ids = offsets.long() + torch.arange(len(offsets))
    marked = marks.bool().nonzero()[:, 0]
    if len(token_ids) != size or len(marks) != vocab_size or not torch.equal(token_ids, marked):
        raise CheckpointError(
            f"expected d2t of {folder} to hold, per draft token, how much larger the target's id is, and t2d to mark "
            f"the same {size} tokens of {vocab_size}, got an inconsistent map"
        )
    return DraftVocabulary(vocab_size, token_ids)


def checkpoint_tensors(head: nn.Module, vocabulary: DraftVocabulary) -> dict[str, Tensor]:
    """Return the tensors of a head with its vocabulary as `d2t` and `t2d`, if it is not whole."""
    tensors: dict[str, Tensor] = head.state_dict()
    token_ids = tensors.pop("vocabulary.token_ids", None)
    if token_ids is None:
        return tensors
    token_ids = token_ids.cpu()
    marks = torch.zeros(vocabulary.vocab_size, dtype=torch.bool).index_fill(0, token_ids, True)
    return {**tensors, "d2t": token_ids - torch.arange(len(token_ids)), "t2d": marks}
