"""Hidden states of the target for training texts, computed per batch or stored on disk once.

Both ways use the runtime that also decodes, so any dtype and any runtime can be used. Stored
states take two bytes per number: 1,000 texts of 512 tokens with 4 layers of width 4096 take
17 GB, so the default is to compute them again for every batch.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Protocol

import torch
from safetensors.torch import load_file, save
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

from secondguess.core import Row
from secondguess.errors import BadInputError, UnsupportedModelError
from secondguess.heads.learning import TrainingBatch
from secondguess.runtime.base import EmbeddingAndHead, HiddenStates, Runtime
from secondguess.sampling import SamplingParams
from secondguess.train.files import write_atomically
from secondguess.train.training_data import Batch, TrainingText

LAST_LAYER = -1
"""Index of the last, normalised hidden states, from which the LM head computes the logits."""
GIGABYTE = 1_000_000_000
TEXTS_AT_ONCE = 32
"""Number of texts that the target reads at once for a capture to disk."""

Report = Callable[[str], None]


class Capture(Protocol):
    """Source of the target's hidden states for batches of texts."""

    def training_batch(self, batch: Batch) -> TrainingBatch:
        """Return the batch with hidden states, in float32 on the target's device."""
        ...


class LiveCapture:
    """Capture that runs the target on every batch when it is requested.

    Args:
        target: runtime that can return hidden states.
        layers: layers to return in addition to the last.

    Raises:
        UnsupportedModelError: a runtime that returns no hidden states.
    """

    def __init__(self, target: Runtime, layers: Sequence[int]) -> None:
        self.target = target
        self.layers = tuple(dict.fromkeys([*layers, LAST_LAYER]))
        target.request_hidden_states(self.layers)

    def training_batch(self, batch: Batch) -> TrainingBatch:
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
    """Capture that reads hidden states from disk, one file per text; `fill` writes them.

    Args:
        folder: folder of the files.
        texts: texts to which the states belong.
        layers: layers to store in addition to the last.
        target: runtime that computes the states.
        dtype: dtype of the files, `float16` or `bfloat16`.
    """

    def __init__(
        self,
        folder: Path,
        texts: Sequence[TrainingText],
        layers: Sequence[int],
        target: Runtime,
        dtype: torch.dtype,
    ) -> None:
        self.folder, self.texts, self.dtype = folder, texts, dtype
        self.live = LiveCapture(target, layers)

    def num_bytes(self, texts: Sequence[TrainingText]) -> int:
        """Return the size of the states of some texts in bytes."""
        width, num_layers = self.live.target.embedding_and_head().width, len(self.live.layers)
        return sum(len(text.tokens) for text in texts) * width * int(self.dtype.itemsize) * num_layers

    def fill(self, gigabytes: float, report: Report, pause: Callable[[], None] = lambda: None) -> None:
        """Compute and store the states of all texts, continuing an interrupted call.

        Args:
            gigabytes: maximum size of the files.
            report: callback for a line with the size.
            pause: called after some texts; may raise without losing work.

        Raises:
            BadInputError: files larger than `gigabytes` or than the free disk space, or states
                outside the range of the dtype.
        """
        num_tokens = sum(len(text.tokens) for text in self.texts)
        what = f"the states of {num_tokens} tokens in {len(self.live.layers)} layers"
        needed = self.num_bytes(self.texts) / GIGABYTE
        if needed > gigabytes:
            raise BadInputError(
                f"expected --capture-gb of at least {needed:.3g} for {what}, got {gigabytes:g}; give more, fewer "
                "texts, or leave it out to read the texts anew for every batch"
            )
        self._remove_other_states()
        missing = [index for index in range(len(self.texts)) if not self._path(index).is_file()]
        to_write = self.num_bytes([self.texts[index] for index in missing]) / GIGABYTE
        free = shutil.disk_usage(self.folder).free / GIGABYTE
        if to_write > free:
            raise BadInputError(
                f"expected {to_write:.3g} GB of disk for {what}, got {free:.3g}; leave out --capture-gb"
            )
        report(f"capturing {what}: {needed:.3g} GB of the {gigabytes:g} allowed")
        for start in range(0, len(missing), TEXTS_AT_ONCE):
            part = missing[start : start + TEXTS_AT_ONCE]
            states = self.live.states([self.texts[index].tokens for index in part])
            for index, hidden in zip(part, states, strict=True):
                self._store(index, hidden)
            pause()

    def training_batch(self, batch: Batch) -> TrainingBatch:
        hidden = [
            {int(layer): states for layer, states in load_file(self._path(index)).items()}
            for index in batch.indices
        ]
        return _padded_batch(batch, hidden, self.live.target.device)

    def _path(self, index: int) -> Path:
        return self.folder / f"{index:07}.safetensors"

    def _remove_other_states(self) -> None:
        """Remove files with other layers, as for another version of a head, or in another dtype."""
        mark = self.folder / "states.json"
        wanted = {"layers": list(self.live.layers), "dtype": str(self.dtype)}
        if not mark.is_file() or json.loads(mark.read_text()) != wanted:
            shutil.rmtree(self.folder, ignore_errors=True)
            self.folder.mkdir(parents=True, exist_ok=True)
            with write_atomically(mark) as stream:
                stream.write(json.dumps(wanted).encode())

    def _store(self, index: int, hidden: HiddenStates) -> None:
        stored = {str(layer): states.to(self.dtype).cpu().contiguous() for layer, states in hidden.items()}
        for layer, states in stored.items():
            if not bool(torch.isfinite(states).all()):
                raise BadInputError(
                    f"expected states of layer {layer} that {self.dtype} can hold, got larger ones; "
                    "leave out --capture-gb, or use --dtype bfloat16"
                )
        with write_atomically(self._path(index)) as stream:
            stream.write(save(stored))


def _padded_batch(batch: Batch, hidden: Sequence[HiddenStates], device: torch.device) -> TrainingBatch:
    """Return a batch with hidden states per row, padded with zeros, all on one device."""
    layers = {
        layer: pad_sequence([of_row[layer].float() for of_row in hidden], batch_first=True).to(device)
        for layer in hidden[0]
    }
    return TrainingBatch(batch.tokens.to(device), batch.counts.to(device), layers)


def frozen_float32_embedding_and_head(target: Runtime) -> EmbeddingAndHead:
    """Return the target's embeddings, final norm and LM head, frozen and with float32 outputs.

    They still compute in the target's dtype.

    Raises:
        UnsupportedModelError: an LM head that does not propagate gradients.
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
