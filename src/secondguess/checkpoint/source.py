"""Files of a model: a folder in Transformers' format, or a GGUF file. Each file is read once, and never the network."""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from textwrap import shorten
from typing import Any

import torch

from secondguess.checkpoint.gguf.config import ARCHITECTURES, read_gguf_config
from secondguess.checkpoint.gguf.file import GgufFile
from secondguess.checkpoint.gguf.tokenizer import read_tokenizer as read_gguf_tokenizer
from secondguess.checkpoint.gguf.weights import GgufWeights, count_stored
from secondguess.checkpoint.quantised import (
    Encoding,
    JoinedExperts,
    StoredWeights,
    read_encoding,
    require_unquantised,
)
from secondguess.checkpoint.resolve import find_checkpoint, how_to_complete, is_gguf
from secondguess.checkpoint.weight_files import (
    LFS_ADVICE,
    LFS_POINTER,
    TensorFiles,
    TensorHeader,
    is_lfs_pointer,
    num_in_pickles,
    pickle_files,
    tensor_files,
)
from secondguess.errors import (
    CheckpointError,
    OutOfMemoryError,
    SecondGuessError,
)
from secondguess.runtime.decoder.stored import WeightSource
from secondguess.runtime.system.exclusive import one_at_a_time
from secondguess.runtime.system.quiet import no_progress_bars, quiet
from secondguess.runtime.weight_format import WeightFormat

with quiet():
    from transformers import CONFIG_MAPPING

MAX_LAYERS = 10_000
MAX_REASON_LENGTH = 300
"""Characters of a library's error that are shown."""
TOKENIZER_FILES = ("tokeniz*", "*vocab*", "*.model", "*.tiktoken", "merges.txt", "tekken.json")
"""Patterns of the names of a tokenizer's files."""
ONLY_FILES = {"local_files_only": True, "trust_remote_code": False}
"""Arguments of `from_pretrained`. If `trust_remote_code` is left out, Transformers asks on the standard input."""
RECOMMENDED = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")
"""Fields of `generation_config.json` that are sampling settings."""


class Source(ABC):
    """Files of a model.

    Args:
        path: the folder or the file.

    Attributes:
        config: the Transformers configuration; with a `quantization_config` that Transformers decodes.
        tokenizer: the Transformers tokenizer.
    """

    def __init__(self, path: Path) -> None:
        self.path = path

    @contextmanager
    def reading(self, part: str) -> Iterator[None]:
        """Suppress the output of Transformers, and turn its errors into one that names the part.

        An unreadable part raises exceptions of many libraries and kinds, some of them bare.
        """
        try:
            with one_at_a_time(), no_progress_bars():
                yield
        except SecondGuessError:
            raise
        except Exception as error:
            raise self._named(part, error) from error

    def _named(self, part: str, error: Exception) -> SecondGuessError:
        """Return the error for a part that raised another one."""
        reason = " ".join(str(error).split()) or type(error).__name__
        advice = "copy or download the checkpoint again"
        if isinstance(error, MemoryError) or "allocate memory" in reason:
            return OutOfMemoryError(
                f"expected memory for {part} of {self.path}, got none from the system; use a smaller model or dtype, or "
                "allow this process more"
            )
        if (pointer := next(filter(is_lfs_pointer, self._read_files()), None)) is not None:
            reason, advice = f"{pointer.name}, {LFS_POINTER}", LFS_ADVICE
        elif "ignore_mismatched_sizes" in reason:
            reason = "weights of other shapes than the configuration says"
        elif isinstance(error, PermissionError):
            advice = "allow this user to read it"
        elif isinstance(error, ImportError):
            advice = "install the package, or use another model"
        elif isinstance(error, KeyError):
            reason = f"no {reason}"
        elif "trust_remote_code" in reason:
            reason = "one that needs code of the checkpoint"
            advice = "use a checkpoint without, because it is not run"
        elif "does not recognize this architecture" in reason:
            reason, advice = reason.partition(". ")[0], "update Transformers, or use another model"
        return CheckpointError(
            f"expected {part} that can be read in {self.path}, got: "
            f"{shorten(reason, MAX_REASON_LENGTH, placeholder=' ...')}; {advice}"
        )

    @abstractmethod
    def _read_files(self) -> list[Path]:
        """Return the files that are read for the model, for which Git LFS may have left pointers."""

    @cached_property
    def config(self) -> Any:
        with self.reading("a configuration"):
            config = self._read_config()
            # encoders with a decoder are refused by name later; they may have several text configurations
            if not config.is_encoder_decoder:
                _require_sizes(config.get_text_config())
            return config

    @abstractmethod
    def _read_config(self) -> Any: ...

    @cached_property
    def tokenizer(self) -> Any:
        with self.reading("a tokenizer"):
            tokenizer = self._read_tokenizer()
            if len(tokenizer.get_vocab()) <= len(tokenizer.get_added_vocab()):
                raise ValueError("it has no tokens of its own")
            return tokenizer

    @abstractmethod
    def _read_tokenizer(self) -> Any: ...

    @property
    def processor(self) -> Any:
        """Processor that turns images into inputs of the model.

        Raises:
            CheckpointError: there is none, or it cannot be read.
        """
        raise CheckpointError(
            f"expected a processor for images, got {self.path}, which has none; use the model's folder"
        )

    @property
    def generation_values(self) -> Mapping[str, Any]:
        """Fields of `generation_config.json`; none without that file."""
        return {}

    @property
    def recommended_sampling(self) -> dict[str, Any]:
        """Sampling settings in `generation_config.json`."""
        values = self.generation_values
        return {name: values[name] for name in RECOMMENDED if values.get(name) is not None}

    @abstractmethod
    def encoding(self, device: torch.device) -> Encoding | None:
        """Return the encoding of a folder whose weights are decoded here for a device; None for any other.

        Raises:
            UnsupportedModelError: an encoding that is not decoded.
        """

    @property
    @abstractmethod
    def weight_files(self) -> list[Path]:
        """Files of the weights, sorted by name."""

    def require_weights(self) -> None:
        """Refuse a folder without files of weights.

        Raises:
            CheckpointError: there are none.
        """
        if not self.weight_files:
            raise CheckpointError(
                f"expected weights in {self.path} (model.safetensors, shards with their index, or pytorch_model.bin), "
                "got none; copy or download the checkpoint again"
            )

    @property
    @abstractmethod
    def has_single_weights(self) -> bool:
        """True if weights can be read one by one, from memory-mapped files."""

    @abstractmethod
    def count_parameters(self, suffix: str = "") -> int:
        """Return the number of weights, from headers; with `suffix`, of tensors whose names end with it."""

    @abstractmethod
    def count_stored(self, device: torch.device) -> dict[WeightFormat, int]:
        """Return the number of weights of linear layers that the kernels keep as they are stored, by encoding."""

    @property
    def is_quantised_throughout(self) -> bool:
        """True if no weights are left that another encoding could change."""
        return False

    @abstractmethod
    def weights(self, device: torch.device, by_expert: bool = True) -> WeightSource:
        """Return the weights, to be read one by one; `has_single_weights` must be true.

        Args:
            device: device for which quantised weights are decoded.
            by_expert: whether joined weights of experts are named one by one.
        """

    def close(self) -> None:
        """Close the files of the weights; they are opened again if they are needed."""


class FolderSource(Source):
    """Folder in Transformers' format."""

    @cached_property
    def values(self) -> dict[str, Any]:
        """Contents of `config.json`.

        Raises:
            CheckpointError: it cannot be read.
        """
        with self.reading("a configuration"):
            values = json.loads((self.path / "config.json").read_bytes(), object_hook=_special_float)
            if not isinstance(values, dict):
                raise ValueError("not a JSON object")
            return values

    def _read_config(self) -> Any:
        values = dict(self.values)
        kind = values.get("model_type")
        if kind not in CONFIG_MAPPING:
            if values.get("auto_map"):
                raise ValueError("trust_remote_code is needed")
            raise ValueError(f"model type {kind!r:.60}: Transformers does not recognize this architecture")
        return CONFIG_MAPPING[kind].from_dict(values)

    def _read_tokenizer(self) -> Any:
        from transformers import AutoTokenizer

        if not any(next(self.path.glob(name), None) for name in TOKENIZER_FILES):
            raise CheckpointError(
                f"expected a tokenizer in {self.path}, got none of its files, such as tokenizer.json; "
                f"{how_to_complete(str(self.path))}"
            )
        return AutoTokenizer.from_pretrained(str(self.path), config=self.config, **ONLY_FILES)

    @cached_property
    def processor(self) -> Any:
        from transformers import AutoProcessor, ProcessorMixin

        with self.reading("a processor for images"):
            processor = AutoProcessor.from_pretrained(str(self.path), **ONLY_FILES)
            if not isinstance(processor, ProcessorMixin):
                raise ValueError(
                    f"a {type(processor).__name__} alone; add the processor's files of the original"
                )
            return processor

    @cached_property
    def generation_values(self) -> Mapping[str, Any]:
        file = self.path / "generation_config.json"
        if not file.is_file():
            return {}
        with self.reading("a generation configuration"):
            values = json.loads(file.read_bytes())
            if not isinstance(values, dict):
                raise ValueError("not a JSON object")
            return values

    def _read_files(self) -> list[Path]:
        others = (file for name in ("config.json", *TOKENIZER_FILES) for file in self.path.glob(name))
        return [*self.weight_files, *others]

    @cached_property
    def tensors(self) -> TensorFiles:
        """Opened safetensors files."""
        return TensorFiles(tensor_files(self.path, self.values))

    @property
    def headers(self) -> Mapping[str, TensorHeader]:
        """Shapes and dtypes of the tensors in safetensors files."""
        return self.tensors.headers

    def encoding(self, device: torch.device) -> Encoding | None:
        return read_encoding(self.values, lambda: self.headers, device)

    def require_unquantised(self) -> None:
        """Refuse quantised weights that no `quantization_config` describes.

        Raises:
            UnsupportedModelError: there are some.
        """
        require_unquantised(self.path, self.values, lambda: self.headers)

    @property
    def weight_files(self) -> list[Path]:
        return tensor_files(self.path, self.__dict__.get("values", {})) or pickle_files(self.path)

    @property
    def has_single_weights(self) -> bool:
        return bool(self.headers)

    def count_parameters(self, suffix: str = "") -> int:
        if not self.headers:
            return num_in_pickles(self.path, self.values)
        return sum(header.num_elements for name, header in self.headers.items() if name.endswith(suffix))

    def count_stored(self, device: torch.device) -> dict[WeightFormat, int]:
        encoding = self.encoding(device)
        if encoding is None or not encoding.has_codes:
            return {}
        return {
            encoding.weight_format: self.count_parameters(encoding.codes) * (encoding.word // encoding.bits)
        }

    def weights(self, device: torch.device, by_expert: bool = True) -> WeightSource:
        encoding = self.encoding(device)
        if encoding is not None and encoding.joins_experts:
            return JoinedExperts(self.tensors, encoding, by_expert)
        return StoredWeights(self.tensors, encoding)

    def close(self) -> None:
        self.__dict__.pop("tensors", None)


def _require_sizes(config: Any) -> None:
    """Refuse a configuration without layers or positions."""
    for name in ("num_hidden_layers", "max_position_embeddings"):
        number = vars(config).get(config.attribute_map.get(name, name))  # XLNet computes -1, for no limit
        if number is not None and number < 1:
            raise ValueError(f"{name} is {number}, not 1 or more")
    if (num_layers := getattr(config, "num_hidden_layers", 0)) > MAX_LAYERS:
        raise ValueError(f"num_hidden_layers is {num_layers:,}, not up to {MAX_LAYERS:,}")


def _special_float(found: dict[str, Any]) -> Any:
    """Return a number that JSON lacks, which Transformers writes as an object; any other object as it is."""
    return float(found["__float__"]) if found.keys() == {"__float__"} else found


class GgufSource(Source):
    """GGUF file."""

    @cached_property
    def file(self) -> GgufFile:
        """The header, and the memory-mapped tensors."""
        return GgufFile(self.path)

    @property
    def is_known(self) -> bool:
        """True if the weights are read here, not by Transformers."""
        return self.file.architecture in ARCHITECTURES

    def _read_config(self) -> Any:
        return read_gguf_config(self.file)

    def _read_tokenizer(self) -> Any:
        return read_gguf_tokenizer(self.file)

    def _read_files(self) -> list[Path]:
        return [self.path]

    def encoding(self, device: torch.device) -> Encoding | None:
        return None

    @property
    def weight_files(self) -> list[Path]:
        return [self.path]

    @property
    def has_single_weights(self) -> bool:
        return self.is_known

    def count_parameters(self, suffix: str = "") -> int:
        return sum(tensor.num_elements for name, tensor in self.file.tensors.items() if name.endswith(suffix))

    def count_stored(self, device: torch.device) -> dict[WeightFormat, int]:
        return count_stored(self.file)

    @property
    def is_quantised_throughout(self) -> bool:
        return all(tensor.is_quantised for tensor in self.file.tensors.values() if len(tensor.shape) > 1)

    def weights(self, device: torch.device, by_expert: bool = True) -> WeightSource:
        return GgufWeights(self.file, self.config)

    def close(self) -> None:
        self.__dict__.pop("file", None)


def open_source(name: str) -> Source:
    """Return the files of a model.

    Args:
        name: a directory, a GGUF file, a repository in the local Hugging Face cache, `builtin` or
            `builtin-draft`.

    Raises:
        CheckpointError: if there is none; the message lists the places that were searched.
    """
    path = find_checkpoint(name)
    return GgufSource(Path(path)) if is_gguf(path) else FolderSource(Path(path))
