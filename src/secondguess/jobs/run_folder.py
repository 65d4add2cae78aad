"""The folder of a training run: it belongs to one run, and says which."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from secondguess.errors import BadInputError, CheckpointError
from secondguess.jobs.lesson_texts import AnswerSettings
from secondguess.runtime.fingerprint import hash_weights
from secondguess.runtime.loading import find_checkpoint
from secondguess.train.files import write_atomically


def identity_of_texts(
    model: str, data: Sequence[Path], num_prompts: int, answers: AnswerSettings, dtype: str
) -> dict[str, Any]:
    """What decides the texts that a target writes: two runs with the same have the same texts."""
    return {
        "target_sha256": hash_weights(Path(find_checkpoint(model))),
        "data_sha256": [hashlib.sha256(path.read_bytes()).hexdigest() for path in data],
        "num_prompts": num_prompts,
        "answers": json.loads(json.dumps(asdict(answers))),
        "dtype": dtype,
    }


def claim(run: Path, identity: Mapping[str, Any]) -> None:
    """Write down what the run is, or compare with what it was.

    Args:
        run: its folder; made where there is none.
        identity: what decides its results, as JSON has it.

    Raises:
        BadInputError: the folder holds another run.
        CheckpointError: what it holds cannot be read.
    """
    path = run / "run.json"
    if not path.is_file():
        run.mkdir(parents=True, exist_ok=True)
        with write_atomically(path) as stream:
            stream.write(json.dumps(identity, indent=2).encode())
        return
    try:
        before = json.loads(path.read_text())
    except ValueError as error:
        raise CheckpointError(
            f"expected a readable run in {path}, got: {error}; choose another --out"
        ) from error
    differing = [name for name in identity if before.get(name) != identity[name]]
    if differing:
        name = differing[0]
        raise BadInputError(
            f"expected the options of the run in {run} to continue it, got another {name.replace('_', ' ')}: "
            f"{identity[name]!r:.80} instead of {before.get(name)!r:.80}; choose another --out"
        )
