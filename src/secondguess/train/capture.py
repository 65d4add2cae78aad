"""Hidden states of the target for training texts, computed for every batch or stored on disk.

Both ways use the runtime that also decodes, so any dtype and any runtime can be used. Stored
states take two bytes per number: 1,000 texts of 512 tokens with 4 layers of width 4096 take
17 GB, so the default is to compute them again for every batch.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from itertools import accumulate
from pathlib import Path
from typing import TypeAlias

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

from secondguess.core import Row
from secondguess.errors import BadInputError, UnsupportedModelError
from secondguess.files import write_atomically
from secondguess.heads.learning import LAST_HIDDEN, TrainingBatch
from secondguess.runtime.base import EmbeddingAndHead, HiddenStates, Runtime
from secondguess.sampling import SamplingParams
from secondguess.train.training_data import Batch, TrainingText

GIGABYTE = 1_000_000_000


class LiveCapture:
    """Capture that runs the target on every batch when it is requested; it always returns the last layer, too."""

    def __init__(self, target: Runtime, layers: Sequence[int]) -> None:
        self.target = target
        self.layers = tuple(dict.fromkeys([*layers, LAST_HIDDEN]))
        target.request_hidden_states(self.layers)

    def training_batch(self, batch: Batch) -> TrainingBatch:
        """Return the batch with hidden states, in float32 on the target's device."""
        texts = [row[:length] for row, length in zip(batch.tokens.tolist(), batch.lengths, strict=True)]
        return _padded_batch(batch, self.states(texts), self.target.device)

    def states(self, texts: Sequence[list[int]]) -> list[HiddenStates]:
        """Return per text and layer the states `[position, width]`, in the target's dtype."""
        # `begin` caches all tokens but the last, so a token that is never processed is appended.
        rows = [Row([*text, 0], SamplingParams(max_tokens=1)) for text in texts]
        with ExitStack() as at_the_end:
            for row in reversed(rows):
                at_the_end.callback(self.target.release, row)
            seen = self.target.begin(rows)
            return [{layer: hidden[layer] for layer in self.layers} for hidden in seen]


class StoredCapture:
    """Capture that runs the target on the first use of a text and keeps the states on disk.

    There is one memory-mapped file per layer, so that runs of several heads on the same texts can
    share the folder; states of other texts or in another dtype are removed. `gigabytes` limits the files
    together with those of `others`, the texts of another capture.
    """

    def __init__(
        self,
        folder: Path,
        texts: Sequence[TrainingText],
        layers: Sequence[int],
        target: Runtime,
        dtype: torch.dtype,
        gigabytes: float,
        others: Sequence[TrainingText] = (),
    ) -> None:
        self.texts, self.dtype = texts, dtype
        self.live = LiveCapture(target, layers)
        self._ends = list(accumulate(len(text.tokens) for text in texts))
        width = target.embedding_and_head().width
        num_layers, num_tokens = len(self.live.layers), self._ends[-1]
        num_in_all = num_tokens + sum(len(text.tokens) for text in others)
        per_token = width * int(dtype.itemsize) * num_layers / GIGABYTE
        if num_in_all * per_token > gigabytes:
            raise BadInputError(
                f"expected --capture-gb of at least {num_in_all * per_token:.3g} for the states of {num_in_all} tokens in "
                f"{num_layers} layers, got {gigabytes:g}; give more, fewer texts, or leave it out to read the texts anew "
                "for every batch"
            )
        _remove_other_states(folder, texts, dtype)
        paths = {layer: folder / f"layer{layer}.states" for layer in self.live.layers}
        needed = num_tokens * per_token - sum(map(_allocated, paths.values())) / GIGABYTE
        free = shutil.disk_usage(folder).free / GIGABYTE
        if needed > free:
            raise BadInputError(
                f"expected {needed:.3g} GB of disk for the states of {num_tokens} tokens in {num_layers} layers, got "
                f"{free:.3g}; leave out --capture-gb"
            )
        self._states = {
            layer: _mapped(path, num_tokens * width, dtype).view(-1, width) for layer, path in paths.items()
        }
        self._is_stored = {
            layer: _mapped(folder / f"layer{layer}.stored", len(texts), torch.bool)
            for layer in self.live.layers
        }

    def training_batch(self, batch: Batch) -> TrainingBatch:
        new = [
            index for index in batch.indices if not all(stored[index] for stored in self._is_stored.values())
        ]
        found = self.live.states([self.texts[index].tokens for index in new]) if new else []
        for index, hidden in zip(new, found, strict=True):
            self._store(index, hidden)
        hidden_of_rows = [
            {layer: states[self._place(index)] for layer, states in self._states.items()}
            for index in batch.indices
        ]
        return _padded_batch(batch, hidden_of_rows, self.live.target.device)

    def _place(self, index: int) -> slice:
        """Return the positions of a text in the files."""
        return slice(self._ends[index] - len(self.texts[index].tokens), self._ends[index])

    def _store(self, index: int, hidden: HiddenStates) -> None:
        for layer, states in hidden.items():
            rounded = states.to(self.dtype)
            if not bool(torch.isfinite(rounded).all()):
                raise BadInputError(
                    f"expected states of layer {layer} that {self.dtype} can hold, got larger ones; "
                    "leave out --capture-gb, or use --dtype bfloat16"
                )
            self._states[layer][self._place(index)] = rounded.cpu()
            self._is_stored[layer][index] = True


def _remove_other_states(folder: Path, texts: Sequence[TrainingText], dtype: torch.dtype) -> None:
    """Empty a folder unless its record names these texts and this dtype."""
    tokens = hashlib.sha256(json.dumps([text.tokens for text in texts]).encode()).hexdigest()
    wanted, record = {"texts_sha256": tokens, "dtype": str(dtype)}, folder / "states.json"
    try:
        is_of_texts = json.loads(record.read_text()) == wanted
    except (OSError, ValueError):
        is_of_texts = False
    if not is_of_texts:
        if folder.is_symlink():
            raise BadInputError(
                f"expected states of these texts in {folder}, got a link to a folder without them; remove the link"
            )
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        with write_atomically(record) as stream:
            stream.write(json.dumps(wanted).encode())


Capture: TypeAlias = LiveCapture | StoredCapture
"""Source of the target's hidden states for batches of texts."""


def _allocated(path: Path) -> int:
    """Return the number of bytes that a file takes on the disk; 0 if it does not exist."""
    return 512 * path.stat().st_blocks if path.exists() else 0


def _mapped(path: Path, size: int, dtype: torch.dtype) -> Tensor:
    """Return a file as a tensor; a new file contains zeros."""
    if sys.platform == "linux":
        # A write to a map of a file without its blocks would end the process where the disk is full.
        file = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
        try:
            os.posix_fallocate(file, 0, size * dtype.itemsize)
        except OSError as error:
            raise OSError(error.errno, error.strerror, str(path)) from error
        finally:
            os.close(file)
    return torch.from_file(str(path), shared=True, size=size, dtype=dtype)


def _padded_batch(batch: Batch, hidden: Sequence[HiddenStates], device: torch.device) -> TrainingBatch:
    """Return a batch with hidden states per row, padded with zeros, all on one device."""
    layers = {
        layer: pad_sequence([row_hidden[layer].float() for row_hidden in hidden], batch_first=True).to(device)
        for layer in hidden[0]
    }
    return TrainingBatch(batch.tokens.to(device), batch.counts.to(device), layers)


def frozen_float32_embedding_and_head(target: Runtime) -> EmbeddingAndHead:
    """Return the target's embeddings, final norm and LM head, frozen and with float32 outputs.

    They still compute in the target's dtype.
    """
    embedding_and_head = target.embedding_and_head()
    for part in (embedding_and_head.embed, embedding_and_head.normalise, embedding_and_head.unembed):
        if isinstance(part, nn.Module):
            part.requires_grad_(False)

    def normalise(states: Tensor) -> Tensor:
        return embedding_and_head.normalise(states.to(embedding_and_head.dtype)).float()

    def unembed(states: Tensor) -> Tensor:
        return embedding_and_head.unembed(states.to(embedding_and_head.dtype)).float()

    def embed(tokens: Tensor) -> Tensor:
        with torch.no_grad():
            return embedding_and_head.embed(tokens).float()

    probe = torch.zeros(1, embedding_and_head.width, device=target.device, requires_grad=True)
    if not unembed(probe).requires_grad:
        raise UnsupportedModelError(
            "expected a target whose head passes gradients on, got one in packed form; use --dtype float32"
        )
    return EmbeddingAndHead(embedding_and_head.width, torch.float32, embed, normalise, unembed)
