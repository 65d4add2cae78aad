"""Configuration fields that heads in the `speculators` format share."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from secondguess.heads.layer import LayerConfig


def speculators_fields(
    kind: str, num_tokens: int, target: str, architectures: Sequence[str] = ()
) -> dict[str, Any]:
    """Return the fields that name the kind of head, its draft length and its target.

    Args:
        kind: kind of head in the format.
        num_tokens: number of draft tokens.
        target, architectures: name of the target and its architectures.
    """
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
