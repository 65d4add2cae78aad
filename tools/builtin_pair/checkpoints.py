"""Training checkpoints: one file with the whole state of a run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from builtin_pair.model import Decoder, ModelShape
from secondguess.errors import CheckpointError


def read_checkpoint(path: Path) -> dict[str, Any]:
    """Return the content of a training checkpoint.

    Raises:
        CheckpointError: a file that is missing, unreadable or incomplete.
    """
    if not path.is_file():
        raise CheckpointError(
            f"there is no training checkpoint at {path}; start the run with `python -m builtin_pair run`"
        )
    try:
        content: dict[str, Any] = torch.load(path, map_location="cpu", weights_only=True)
        missing = {"shape", "weights", "optimisers", "step", "tokens", "seconds"} - content.keys()
        if missing:
            raise ValueError(f"it lacks {sorted(missing)}")
    except Exception as error:
        raise CheckpointError(
            f"{path} is not a checkpoint of this trainer ({error}); delete it to start anew"
        ) from error
    return content


def read_decoder(path: Path) -> Decoder:
    """Return the decoder of a training checkpoint."""
    return decoder_from(read_checkpoint(path))


def decoder_from(content: dict[str, Any]) -> Decoder:
    decoder = Decoder(ModelShape(**content["shape"]))
    decoder.load_state_dict(content["weights"])
    return decoder
