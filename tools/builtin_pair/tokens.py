"""Tokenised text on disk, and the order in which training reads it.

The window in a row of a batch is a pure function of (seed, step, row) and does not depend on
earlier reads, so a resumed run reads exactly the rows of an uninterrupted one.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy
import torch
from numpy.typing import NDArray
from tokenizers import Tokenizer
from torch import Tensor

from builtin_pair.data import Corpus
from builtin_pair.tokenizer import end_token_id
from secondguess.errors import BadInputError, CheckpointError
from secondguess.files import write_atomically
from secondguess.train.training_data import shuffled_index

PARTS = ("files", "functions", "held_out")
FUNCTION_SHARE = 0.5
"""Share of the rows of a batch that begin at a documented function."""


def _encode(texts: Sequence[str], tokenizer: Tokenizer) -> tuple[NDArray[numpy.uint16], NDArray[numpy.int64]]:
    """Return the texts in one array, each followed by an end token, and their starts."""
    end = end_token_id(tokenizer)
    pieces = [numpy.zeros(0, numpy.uint16)]
    for first in range(
        0, len(texts), 512
    ):  # in batches, as encodings take many times the memory of their ids
        for encoding in tokenizer.encode_batch(texts[first : first + 512], add_special_tokens=False):
            pieces.append(numpy.array([*encoding.ids, end], numpy.uint16))
    starts = numpy.cumsum([len(piece) for piece in pieces[:-1]], dtype=numpy.int64)
    return numpy.concatenate(pieces), starts


def write_tokens(corpus: Corpus, tokenizer: Tokenizer, directory: Path, seed: int) -> None:
    """Tokenise the corpus into ``directory``: one array per part, with shuffled texts.

    Raises:
        BadInputError: a vocabulary that does not fit into 16 bits.
    """
    if tokenizer.get_vocab_size() > 2**16:
        raise BadInputError("tokens are stored in 16 bits; choose a vocabulary of at most 65,536")
    directory.mkdir(parents=True, exist_ok=True)
    order = numpy.random.default_rng(seed)
    parts = {"files": corpus.files, "functions": corpus.functions, "held_out": corpus.held_out}
    summary = {}
    for name, texts in parts.items():
        shuffled = [texts[index] for index in order.permutation(len(texts))]
        tokens, starts = _encode(shuffled, tokenizer)
        with write_atomically(directory / f"{name}.npy") as stream:
            numpy.save(stream, tokens)
        with write_atomically(directory / f"{name}.starts.npy") as stream:
            numpy.save(stream, starts)
        num_bytes = sum(len(text.encode()) for text in texts)
        summary[name] = {"tokens": len(tokens), "documents": len(texts), "bytes": num_bytes}
    with write_atomically(directory / "summary.json") as stream:
        stream.write(json.dumps(summary, indent=2).encode())


@dataclass(frozen=True)
class TokenStore:
    """Source of token rows, from memory-mapped arrays written by ``write_tokens``.

    Args:
        files, functions, held_out: `[token]`, the parts of the corpus.
        function_starts: `[function]`, index of the first token of each function.
        bytes_per_token: mean size of a held-out token.
    """

    files: NDArray[numpy.uint16]
    functions: NDArray[numpy.uint16]
    function_starts: NDArray[numpy.int64]
    held_out: NDArray[numpy.uint16]
    bytes_per_token: float

    @classmethod
    def open(cls, directory: Path) -> TokenStore:
        summary_path = directory / "summary.json"
        if not summary_path.is_file():
            raise CheckpointError(
                f"{directory} holds no tokenised corpus (summary.json is missing); run the data step first"
            )
        held_out = json.loads(summary_path.read_text())["held_out"]
        files, functions, held = (numpy.load(directory / f"{part}.npy", mmap_mode="r") for part in PARTS)
        starts = numpy.load(directory / "functions.starts.npy")
        return cls(files, functions, starts, held, held_out["bytes"] / max(1, held_out["tokens"]))

    def batch(self, seed: int, step: int, rows: int, length: int) -> Tensor:
        """Return rows of ``length + 1`` tokens for one optimiser step: inputs and shifted labels.

        A share of them starts at the beginning of a documented function and continues with the functions
        after it; the others are windows of whole files.

        Raises:
            BadInputError: a corpus that is shorter than one window.
        """
        num_functions = round(rows * FUNCTION_SHARE) if self._usable_functions(length) else 0
        windows = [
            *self._function_rows(seed, step, num_functions, length),
            *self._file_rows(seed, step, rows - num_functions, length),
        ]
        return torch.from_numpy(numpy.stack(windows).astype(numpy.int64))

    def held_out_batch(self, rows: int, length: int) -> Tensor:
        """Return evenly spaced held-out windows of ``length + 1`` tokens, the same in every call.

        Raises:
            BadInputError: a held-out text that is shorter than one window.
        """
        rows = max(1, min(rows, (len(self.held_out) - 1) // length))
        if len(self.held_out) <= length:
            raise BadInputError(
                f"the held-out text has {len(self.held_out)} tokens, fewer than one window of {length}"
            )
        starts = numpy.linspace(0, len(self.held_out) - length - 1, rows).astype(numpy.int64)
        return torch.from_numpy(
            numpy.stack([self.held_out[s : s + length + 1] for s in starts]).astype(numpy.int64)
        )

    def _usable_functions(self, length: int) -> int:
        return int(numpy.searchsorted(self.function_starts, len(self.functions) - length - 1))

    def _function_rows(self, seed: int, step: int, rows: int, length: int) -> Iterator[NDArray[numpy.uint16]]:
        usable = self._usable_functions(length)
        for row in range(rows):
            start = self.function_starts[shuffled_index(seed, 1, step * rows + row, usable)]
            yield self.functions[start : start + length + 1]

    def _file_rows(self, seed: int, step: int, rows: int, length: int) -> Iterator[NDArray[numpy.uint16]]:
        blocks = (len(self.files) - length - 1) // length
        if blocks < 1:
            raise BadInputError(f"the corpus has {len(self.files)} tokens, fewer than one window of {length}")
        for row in range(rows):
            # The grid of windows shifts with the step, so that no token is always first in its window.
            start = shuffled_index(seed, 2, step * rows + row, blocks) * length + step * 37 % length
            yield self.files[start : start + length + 1]
