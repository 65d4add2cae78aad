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
from itertools import accumulate
from pathlib import Path
from typing import Protocol

import numpy
import torch
from torch import Tensor, nn

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
TEXTS_PER_SAVE = 32
"""Number of texts after which a capture to disk records its progress."""

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
        return padded_batch(batch, self.states(texts), self.target.device)

    def states(self, texts: Sequence[list[int]]) -> list[HiddenStates]:
        """Return per text and layer the states `[position, width]`, in the target's dtype."""
        # `begin` caches all tokens but the last, so a token that is never processed is appended.
        rows = [Row([*text, 0], SamplingParams(max_tokens=1)) for text in texts]
        with ExitStack() as at_the_end:
            for row in reversed(rows):
                at_the_end.callback(self.target.end, row)
            seen = self.target.begin(rows)
            return [{layer: hidden[layer] for layer in self.layers} for hidden in seen]


class StoredCapture:
    """Capture that reads hidden states from disk; `fill` writes them.

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
        self.folder, self.texts, self.target, self.dtype = folder, texts, target, dtype
        self.layers = tuple(dict.fromkeys([*layers, LAST_LAYER]))
        self._starts = [0, *accumulate(len(text.tokens) for text in texts)]
        self._maps: dict[int, numpy.memmap] = {}

    @property
    def num_bytes(self) -> int:
        """Size of all files in bytes."""
        itemsize: int = self.dtype.itemsize
        return self._starts[-1] * self.target.embedding_and_head().width * itemsize * len(self.layers)

    def fill(self, gigabytes: float, report: Report, pause: Callable[[], None] = lambda: None) -> None:
        """Compute and store the states of all texts, continuing an interrupted call.

        Args:
            gigabytes: maximum size of the files.
            report: callback for a line with the size.
            pause: called after each recorded progress; may raise without losing work.

        Raises:
            BadInputError: files larger than `gigabytes` or than the free disk space, or states
                outside the range of the dtype.
        """
        self.folder.mkdir(parents=True, exist_ok=True)
        done = self._num_done()
        needed = self.num_bytes / GIGABYTE
        what = f"the states of {self._starts[-1]} tokens in {len(self.layers)} layers"
        if needed > gigabytes:
            raise BadInputError(
                f"expected --capture-gb of at least {needed:.3g} for {what}, got {gigabytes:g}; give more, fewer "
                "texts, or leave it out to read the texts anew for every batch"
            )
        free = shutil.disk_usage(self.folder).free / GIGABYTE
        if done == 0 and needed > free:
            raise BadInputError(
                f"expected {needed:.3g} GB of disk for {what}, got {free:.3g}; leave out --capture-gb"
            )
        report(f"capturing {what}: {needed:.3g} GB of the {gigabytes:g} allowed")
        live = LiveCapture(self.target, self.layers)
        self._open("r+" if done else "w+")
        while done < len(self.texts):
            part = range(done, min(done + TEXTS_PER_SAVE, len(self.texts)))
            for index, hidden in zip(part, live.states([self.texts[i].tokens for i in part]), strict=True):
                self._store(index, hidden)
            for of_layer in self._maps.values():
                of_layer.flush()
            done = part.stop
            with write_atomically(self.folder / "captured.json") as stream:
                stream.write(json.dumps(self._what() | {"num_texts": done}).encode())
            pause()
        self._open("r")

    def training_batch(self, batch: Batch) -> TrainingBatch:
        hidden = [{layer: self._states(index, layer) for layer in self.layers} for index in batch.indices]
        return padded_batch(batch, hidden, self.target.device)

    def _num_done(self) -> int:
        """Return the number of texts whose states are on disk.

        It is 0 if the files have other layers, as for another version of a head, or another dtype,
        as from another machine.
        """
        mark = self.folder / "captured.json"
        found = json.loads(mark.read_text()) if mark.is_file() else {}
        return int(found["num_texts"]) if found.items() >= self._what().items() else 0

    def _what(self) -> dict[str, object]:
        """Return the layers and dtype of the files, as recorded with the progress."""
        return {"layers": list(self.layers), "dtype": str(self.dtype)}

    def _open(self, mode: str) -> None:
        shape = (self._starts[-1], self.target.embedding_and_head().width)
        for layer in self.layers:
            # NumPy has no bfloat16: the bits are stored as int16.
            path = self.folder / f"layer_{layer}.npy"
            if mode == "w+":
                self._maps[layer] = numpy.lib.format.open_memmap(path, "w+", numpy.int16, shape)
            else:
                self._maps[layer] = numpy.lib.format.open_memmap(path, mode)

    def _store(self, index: int, hidden: HiddenStates) -> None:
        for layer, states in hidden.items():
            stored = states.to(self.dtype).cpu()
            if not bool(torch.isfinite(stored).all()):
                raise BadInputError(
                    f"expected states of layer {layer} that {self.dtype} can hold, got larger ones; "
                    "leave out --capture-gb, or use --dtype bfloat16"
                )
            place = slice(self._starts[index], self._starts[index + 1])
            self._maps[layer][place] = stored.view(torch.int16).numpy()

    def _states(self, index: int, layer: int) -> Tensor:
        place = slice(self._starts[index], self._starts[index + 1])
        return torch.from_numpy(self._maps[layer][place].copy()).view(self.dtype)


def padded_batch(batch: Batch, hidden: Sequence[HiddenStates], device: torch.device) -> TrainingBatch:
    """Return a batch with hidden states per row, padded with zeros, all on one device."""
    width = batch.tokens.shape[1]
    layers = {
        layer: torch.stack([_padded(of_row[layer].float(), width) for of_row in hidden]).to(device)
        for layer in hidden[0]
    }
    return TrainingBatch(batch.tokens.to(device), batch.counts.to(device), layers)


def _padded(states: Tensor, length: int) -> Tensor:
    padded = states.new_zeros(length, states.shape[-1])
    padded[: len(states)] = states
    return padded


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
