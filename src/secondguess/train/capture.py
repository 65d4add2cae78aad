"""Hidden states of the target for training texts, computed for every batch or stored on disk.

Both ways use the runtime that also decodes, so any dtype and any runtime can be used. Stored
states take two bytes per number: 1,000 texts of 512 tokens with 4 layers of width 4096 take
17 GB, so the default is to compute them again for every batch.
"""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import TypeAlias

import torch
from safetensors.torch import load_file, save
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

from secondguess.core import Row
from secondguess.errors import BadInputError
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
    """Capture that runs the target on the first use of a text and keeps the states on disk, in one file per text.

    Runs of several heads on the same texts can share the folder; states of other texts or in another dtype are
    removed. `gigabytes` limits the files together with those of `others`, the texts of another capture.
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
        self.folder, self.texts, self.dtype = folder, texts, dtype
        self.live = LiveCapture(target, layers)
        num_tokens, num_layers = _num_tokens([*texts, *others]), len(self.live.layers)
        per_token = target.embedding_and_head().width * int(dtype.itemsize) * num_layers / GIGABYTE
        if num_tokens * per_token > gigabytes:
            raise BadInputError(
                f"expected --capture-gb of at least {num_tokens * per_token:.3g} for the states of {num_tokens} tokens in "
                f"{num_layers} layers, got {gigabytes:g}; give more, fewer texts, or leave it out to read the texts anew "
                "for every batch"
            )
        _remove_other_states(folder, texts, dtype)
        new = _num_tokens([text for index, text in enumerate(texts) if not self._path(index).exists()])
        free = shutil.disk_usage(folder).free / GIGABYTE
        if new * per_token > free:
            raise BadInputError(
                f"cannot store the states of {new} tokens in {num_layers} layers: they take {new * per_token:.3g} GB of disk, "
                f"and {free:.3g} are free. Leave out --capture-gb."
            )

    def training_batch(self, batch: Batch) -> TrainingBatch:
        found = {index: self._stored(index) for index in batch.indices}
        new = [index for index, states in found.items() if not states]
        if new:
            hidden = self.live.states([self.texts[index].tokens for index in new])
            found |= {index: self._store(index, states) for index, states in zip(new, hidden, strict=True)}
        return _padded_batch(batch, [found[index] for index in batch.indices], self.live.target.device)

    def _path(self, index: int) -> Path:
        return self.folder / f"{index:07}.safetensors"

    def _stored(self, index: int) -> HiddenStates:
        """Return the stored states of a text; none if a layer is missing."""
        path = self._path(index)
        stored = load_file(path) if path.exists() else {}
        is_complete = all(str(layer) in stored for layer in self.live.layers)
        return {layer: stored[str(layer)] for layer in self.live.layers} if is_complete else {}

    def _store(self, index: int, hidden: HiddenStates) -> HiddenStates:
        """Store the states of a text beside those of other layers, and return them as they are stored."""
        rounded = {layer: states.to(self.dtype).cpu().contiguous() for layer, states in hidden.items()}
        for layer, states in rounded.items():
            if not bool(torch.isfinite(states).all()):
                raise BadInputError(
                    f"cannot store the states of layer {layer}: they are too large for {self.dtype}. Leave out --capture-gb, or "
                    "use --dtype bfloat16."
                )
        path = self._path(index)
        others = load_file(path) if path.exists() else {}
        with write_atomically(path) as stream:
            stream.write(save({**others, **{str(layer): states for layer, states in rounded.items()}}))
        return rounded


def _num_tokens(texts: Sequence[TrainingText]) -> int:
    return sum(len(text.tokens) for text in texts)


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
                f"cannot store states in {folder}: it links to a folder with those of other texts. Remove the link."
            )
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        with write_atomically(record) as stream:
            stream.write(json.dumps(wanted).encode())


Capture: TypeAlias = LiveCapture | StoredCapture
"""Source of the target's hidden states for batches of texts."""


def _padded_batch(batch: Batch, hidden: Sequence[HiddenStates], device: torch.device) -> TrainingBatch:
    """Return a batch with hidden states per row, padded with zeros, all on one device."""
    layers = {
        layer: pad_sequence([row_hidden[layer].float() for row_hidden in hidden], batch_first=True).to(device)
        for layer in hidden[0]
    }
    return TrainingBatch(batch.tokens.to(device), batch.counts.to(device), layers)


def frozen_float32_embedding_and_head(target: Runtime) -> EmbeddingAndHead:
    """Return the target's embeddings, norm and LM head, frozen; they compute in the target's dtype and return float32."""
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

    return EmbeddingAndHead(embedding_and_head.width, torch.float32, embed, normalise, unembed)
