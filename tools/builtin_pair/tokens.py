"""Tokenised text on disk, and the order in which training reads it.

The window in a row of a batch is a pure function of (seed, step, row) and does not depend on
earlier reads, so a resumed run reads exactly the rows of an uninterrupted one.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy
import torch
from numpy.typing import NDArray
from tokenizers import Tokenizer
from torch import Tensor

from builtin_pair.data import Corpus, Document
from builtin_pair.tokenizer import end_token_id
from secondguess.errors import BadInputError, CheckpointError
from secondguess.train.files import write_atomically
from secondguess.train.training_data import shuffled_index

PARTS = ("files", "functions", "held_out")


def _encode(
    documents: Sequence[Document], tokenizer: Tokenizer
) -> tuple[NDArray[numpy.uint16], NDArray[numpy.int64]]:
    """Return the documents in one array, each followed by an end token, and their starts."""
    end = end_token_id(tokenizer)
    pieces: list[NDArray[numpy.uint16]] = []
    for first in range(0, len(documents), 512):
        batch = [document.text for document in documents[first : first + 512]]
        for encoding in tokenizer.encode_batch(batch, add_special_tokens=False):
            pieces.append(numpy.array([*encoding.ids, end], dtype=numpy.uint16))
    starts = numpy.cumsum([0, *(len(piece) for piece in pieces)])[:-1].astype(numpy.int64)
    return (numpy.concatenate(pieces) if pieces else numpy.zeros(0, numpy.uint16)), starts


def write_tokens(corpus: Corpus, tokenizer: Tokenizer, directory: Path, seed: int) -> None:
    """Tokenise the corpus into ``directory``: one array per part, with shuffled documents.

    Raises:
        BadInputError: a vocabulary that does not fit into 16 bits.
    """
    if tokenizer.get_vocab_size() > 2**16:
        raise BadInputError("tokens are stored in 16 bits; choose a vocabulary of at most 65,536")
    directory.mkdir(parents=True, exist_ok=True)
    order = numpy.random.default_rng(seed)
    parts = {
        "files": [document for document in corpus.training if not document.is_function],
        "functions": [document for document in corpus.training if document.is_function],
        "held_out": [document for document in corpus.held_out if not document.is_function],
    }
    summary = {}
    for name, documents in parts.items():
        shuffled = [documents[index] for index in order.permutation(len(documents))]
        tokens, starts = _encode(shuffled, tokenizer)
        with write_atomically(directory / f"{name}.npy") as stream:
            numpy.save(stream, tokens)
        with write_atomically(directory / f"{name}.starts.npy") as stream:
            numpy.save(stream, starts)
        num_bytes = sum(len(document.text.encode()) for document in documents)
        summary[name] = {"tokens": len(tokens), "documents": len(documents), "bytes": num_bytes}
    with write_atomically(directory / "summary.json") as stream:
        stream.write(json.dumps(summary, indent=2).encode())


@dataclass(frozen=True)
class TokenStore:
    """Memory-mapped arrays written by ``write_tokens``."""

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

    def batch(self, seed: int, step: int, rows: int, length: int, function_share: float = 0.5) -> Tensor:
        """Return rows of ``length + 1`` tokens for one optimiser step: inputs and shifted labels.

        A share of the rows starts at the beginning of a documented function and continues with
        the functions after it; the other rows are windows of whole files.

        Raises:
            BadInputError: a corpus that is shorter than one window.
        """
        num_functions = round(rows * function_share) if self._usable_functions(length) else 0
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

    def _function_rows(self, seed: int, step: int, rows: int, length: int) -> list[NDArray[numpy.uint16]]:
        if not rows:
            return []
        usable = self._usable_functions(length)
        starts = [
            int(self.function_starts[shuffled_index(seed, 1, step * rows + row, usable)])
            for row in range(rows)
        ]
        return [self.functions[start : start + length + 1] for start in starts]

    def _file_rows(self, seed: int, step: int, rows: int, length: int) -> list[NDArray[numpy.uint16]]:
        blocks = (len(self.files) - length - 1) // length
        if blocks < 1:
            raise BadInputError(f"the corpus has {len(self.files)} tokens, fewer than one window of {length}")
        starts = [shuffled_index(seed, 2, step * rows + row, blocks) * length for row in range(rows)]
        # The grid of windows shifts with the step, so that no token is always first in its window.
        shift = step * 37 % length
        return [self.files[start + shift : start + shift + length + 1] for start in starts]
