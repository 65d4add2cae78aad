"""Plans of loading: a checkpoint with settings, resolved once from headers, before any weight is read."""

from __future__ import annotations

import math
import re
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from os import PathLike, fspath
from textwrap import shorten
from typing import Any

import torch

from secondguess.checkpoint.codes import TokenCodes
from secondguess.checkpoint.memory import (
    MemoryEstimate,
    available_memory,
    head_memory,
    peak_memory,
)
from secondguess.checkpoint.quantised import Encoding, encoding_error
from secondguess.checkpoint.resolve import check_dtype, check_quantization, check_runtime
from secondguess.checkpoint.source import FolderSource, Source, open_source
from secondguess.errors import BadInputError, CheckpointError, UnsupportedModelError
from secondguess.runtime.coverage import unsupported_reason
from secondguess.runtime.cpu.check import HEAD_OUTPUTS
from secondguess.runtime.decoder.families import FAMILIES, weight_shapes
from secondguess.runtime.decoder.products import can_pack
from secondguess.runtime.modules.packing import LinearCounts, can_quantise, count_linears, few_linears_error
from secondguess.runtime.modules.support import (
    cached_layers,
    cached_values_per_token,
    check_class,
    check_config,
    context_length_of,
)
from secondguess.runtime.refusals import quantised_copy_error
from secondguess.runtime.system.machine import has_bfloat16
from secondguess.runtime.system.quiet import quiet
from secondguess.runtime.weight_format import (
    BFLOAT16,
    INT4,
    INT8,
    QUANTIZATIONS,
    STORED_INT4,
    STORED_INT8,
    WeightFormat,
)

DEFAULT_CONTEXT = 4096
"""Cached tokens, over all rows, that must fit into memory with the weights by default."""
BYTES_OF_CHECK = 8
"""Bytes per weight of a layer that the check at loading takes: in float32, with the padding of blocks."""
CAUSAL_SUFFIXES = ("ForCausalLM", "LMHeadModel", "ForConditionalGeneration")
DEQUANTISED = ("fp8", "compressed-tensors", "mxfp4")
"""Encodings that Transformers dequantises when it loads a checkpoint, at least on some machines."""
EXPERT_NUMBER = re.compile(r"\.experts\.\d+\.")
"""Part of the names of the weights of one expert."""
LAYER_NUMBER = re.compile(r".*?\.\d+\.")
OTHER_EXPERT = re.compile(r"\.experts\.[1-9]\d*\.")
MAX_REASON_LENGTH = 300
"""Characters of a quantization that are shown."""


@dataclass(frozen=True, eq=False)
class Checkpoint:
    """Checkpoint of a causal language model with the settings of loading. Made by `resolve`.

    Args:
        name: name or path as given by the user.
        source: its files; None for a model passed to `wrap_model` that has none.
        config: the Transformers configuration, without `quantization_config` if the weights are decoded here.
        dtype: compute dtype, also with `quantize`.
        device: device of weights and caches.
        runtime, quantize, drafts: as in `resolve`.
        dtype_needs_kernels: True if bfloat16 was picked because the kernels run the model, on a
            processor on which it is slow otherwise.
    """

    name: str
    source: Source | None
    config: Any
    dtype: torch.dtype
    device: torch.device
    runtime: str = "auto"
    quantize: str | None = None
    drafts: bool = False
    dtype_needs_kernels: bool = False

    @classmethod
    def resolve(
        cls,
        name: str | PathLike[str],
        *,
        dtype: str = "auto",
        device: str = "auto",
        quantize: str | None = None,
        runtime: str = "auto",
        drafts: bool = False,
    ) -> Checkpoint:
        """Find a checkpoint and check that it can be loaded, without reading its weights.

        Args:
            name: a directory, a GGUF file, a repository in the local Hugging Face cache, or a
                built-in model (`builtin` or `builtin-draft`).
            dtype, device, quantize, runtime: as in `secondguess.load`.
            drafts: whether the model is used for drafting only. The kernels, if they run it, then
                quantise its weights to 8 bits, which is faster and changes probabilities slightly.

        Raises:
            BadInputError: if the dtype, device, quantization or runtime is not available.
            CheckpointError: if the checkpoint is missing, broken or of the wrong kind.
            UnsupportedModelError: if the model cannot be decoded speculatively, or not by this
                runtime.
        """
        check_dtype(dtype)
        check_quantization(quantize)
        check_runtime(runtime)
        picked, source = pick_device(device), open_source(fspath(name))
        config = source.config
        if source.encoding(picked) is not None and hasattr(config, "quantization_config"):
            del config.quantization_config  # decoded here, not by Transformers
        check_loadable(config, source, picked)
        needs_kernels = False
        if dtype == "auto":
            by_kernels = runtime in ("auto", "native") and not unsupported_reason(
                "native", config, torch.bfloat16, picked
            )
            needs_kernels = by_kernels and not has_bfloat16(picked)
            fastest = torch.bfloat16 if by_kernels or has_bfloat16(picked) else torch.float32
            dtype = str(dtype_for_torchao(config, fastest)).removeprefix("torch.")
        check_dtype_of_torchao(config, getattr(torch, dtype), str(source.path))
        found = cls(
            fspath(name),
            source,
            config,
            getattr(torch, dtype),
            picked,
            runtime,
            quantize,
            drafts,
            needs_kernels,
        )
        by_kernels = "native" in found.runtimes  # raises an error if no runtime covers the model
        if quantize is not None and by_kernels and source.is_quantised_throughout:
            raise BadInputError(
                f"expected a checkpoint with weights to quantise, for quantize={quantize!r}, got {found.name}, whose weights "
                "are all stored quantised, and which the kernels keep as they are; leave it out"
            )
        if quantize is not None and not by_kernels and not found.quantises_linears:
            require_torchao()
        return found

    @classmethod
    def from_module(cls, model: Any) -> Checkpoint:
        """Describe a model in memory, whose directory need not exist."""
        name, source = str(model.name_or_path), None
        if name:
            with suppress(CheckpointError):
                source = open_source(name)
        return cls(name, source, model.config, model.dtype, model.device)

    @property
    def path(self) -> str:
        """Directory of the checkpoint, or its GGUF file; the name, for a model without files."""
        return self.name if self.source is None else str(self.source.path)

    @property
    def files(self) -> Source:
        """Files of the checkpoint.

        Raises:
            CheckpointError: a model in memory alone.
        """
        if self.source is None:
            raise CheckpointError(f"expected the files of {self.name}, got a model in memory alone")
        return self.source

    @cached_property
    def runtimes(self) -> list[str]:
        """Runtimes that cover the model, in the order in which loading tries them.

        Raises:
            UnsupportedModelError: if there is none.
        """
        by_kernels = not self._unsupported_reason("native")
        covers = {
            "native": by_kernels,
            "fused": self.quantize is None and not self._unsupported_reason("fused"),
            "graphs": self.quantize is None and not self._unsupported_reason("graphs"),
            # after the kernels' refusal, loading checks it
            "transformers": (by_kernels and self.runtime == "auto") or self._module_runs,
        }
        found = [name for name, covered in covers.items() if covered and self.runtime in ("auto", name)]
        if not found:
            raise self.not_covered()
        return found

    @cached_property
    def encoding(self) -> Encoding | None:
        """Encoding of a quantised checkpoint that is decoded at loading; None for any other."""
        return self.files.encoding(self.device)

    @property
    def weight_formats(self) -> list[WeightFormat]:
        """Encodings in which the kernels hold the weights, in the order in which loading tries them.

        A draft model whose check fails in 8 bits is tried in bfloat16, still faster than elsewhere.
        """
        if self.quantize is not None:
            return [QUANTIZATIONS[self.quantize]]
        if self._num_stored:
            is_in_4_bits = any(each.bits <= INT4.bits for each in self._num_stored)
            return [STORED_INT4 if is_in_4_bits else STORED_INT8, BFLOAT16]
        return [INT8, BFLOAT16] if self.drafts else [BFLOAT16]

    def not_covered(self) -> UnsupportedModelError:
        kept = kept_quantisation(self.config)
        if self.quantize is not None and kept is not None:
            return UnsupportedModelError(
                f"expected a checkpoint that is not quantised, for quantize={self.quantize!r}, got {self.name}, which is "
                f"already quantised ({kept}); load it without quantize"
            )
        if self.quantises_linears and self.runtime in ("auto", "transformers"):
            return few_linears_error(self.name, self._linear_counts)
        if self.quantize not in (None, INT8.name):
            reason = self._unsupported_reason("native")
            return UnsupportedModelError(
                f"expected a model that the compiled kernels run, for quantize={self.quantize!r}, got {self.name}"
                + (f" ({reason})" if reason else f" with runtime {self.runtime}")
                + "; use dtype bfloat16 and runtime auto, or quantize='int8'"
            )
        reason = self._unsupported_reason(self.runtime) if self.runtime in ("native", "graphs") else None
        return UnsupportedModelError(
            f"expected a model that the {self.runtime} runtime covers, got a {self.config.model_type} "
            f"({self.dtype_name} on {self.device}, quantize {self.quantize}{f', {reason}' if reason else ''}); "
            "use runtime auto or transformers"
        )

    def _unsupported_reason(self, runtime: str) -> str | None:
        return unsupported_reason(runtime, self.config, self.dtype, self.device)

    @property
    def is_packed(self) -> bool:
        """True if linear layers of modules are packed for the processor."""
        if self.runtimes[0] == "transformers":
            return self.quantize is None and self.dtype == torch.bfloat16 and can_quantise(self.device)
        return self.quantize is None and can_pack(self.dtype, self.device)

    @property
    def quantises_linears(self) -> bool:
        """True if a module's linear layers are quantised for the kernels, by torchao otherwise."""
        return self.quantize is not None and can_quantise(self.device)

    @property
    def _module_runs(self) -> bool:
        """True if the Transformers module runs with this quantization."""
        if self.quantize is not None and kept_quantisation(self.config) is not None:
            return False
        if self.quantises_linears:
            return self._linear_counts.is_majority
        return self.quantize in (None, INT8.name)

    @cached_property
    def _ties_embeddings(self) -> bool:
        if self.config.model_type in FAMILIES:
            return ties_embeddings(self.config)
        from secondguess.checkpoint.classes import config_of_class

        return ties_embeddings(config_of_class(self.config))

    @cached_property
    def _linear_counts(self) -> LinearCounts:
        return count_linears(self.outline())

    def outline(self) -> Any:
        """Return the Transformers module without memory.

        Raises:
            CheckpointError: if Transformers cannot make it.
        """
        from secondguess.checkpoint.classes import outline_of

        with self.files.reading("a model of a configuration"):
            return outline_of(self.config)

    @property
    def tokenizer(self) -> Any:
        """Tokenizer of the checkpoint; `TokenCodes` for a model of pixels, which has none.

        Raises:
            CheckpointError: if there is none, or it cannot be read.
        """
        return self.files.tokenizer if self._has_text else TokenCodes(self.name, self.config.vocab_size)

    @cached_property
    def _has_text(self) -> bool:
        if self.config.model_type in FAMILIES:
            return True
        from secondguess.checkpoint.classes import has_text

        return has_text(self.config)

    @property
    def processor(self) -> Any:
        """Processor of a vision-language model.

        Raises:
            CheckpointError: if there is none, or it cannot be read.
        """
        return self.files.processor

    @property
    def dtype_name(self) -> str:
        """Name of the compute dtype: `float64`, `float32`, `bfloat16` or `float16`."""
        return str(self.dtype).removeprefix("torch.")

    @property
    def num_layers(self) -> int:
        return int(self.config.get_text_config().num_hidden_layers)

    @property
    def context_length(self) -> int | None:
        """Largest number of positions; None if the configuration sets no limit."""
        return context_length_of(self.config.get_text_config())

    @property
    def cache_bytes_per_token(self) -> int:
        """Bytes of the keys and values of one token, over all layers."""
        layers = cached_layers(self.config)
        return self.dtype.itemsize * sum(cached_values_per_token(layer) for layer in layers)

    def memory(self, num_cached_tokens: int = DEFAULT_CONTEXT) -> MemoryEstimate:
        """Return the memory of the weights and of a KV cache, from the headers of the weight files.

        Raises:
            CheckpointError: if a weight file is broken.
        """
        text, size = self.config.get_text_config(), self.dtype.itemsize
        num_parameters = self.num_parameters
        num_embedded = text.vocab_size * text.hidden_size
        loading = num_parameters * size
        stored = getattr(self.config, "dtype", None)
        if isinstance(stored, torch.dtype) and stored != self.dtype:
            # a tensor is read in the dtype of the file, and then converted
            loading += num_embedded * stored.itemsize
            if self.device.type == "cpu":
                # experts are converted one by one, and then joined; the allocator keeps what they have taken
                loading += self._num_in_experts * size
        by_kernels = self.runtimes[0] == "native"
        is_packed, is_tied = by_kernels or self.is_packed, self._ties_embeddings
        if is_packed and is_tied:  # the head becomes a copy of its own
            num_parameters += num_embedded
        weights = int(num_parameters * size - self._bytes_saved(num_parameters, num_embedded, by_kernels))
        if by_kernels and self.files.has_single_weights:
            # from memory-mapped files; the check takes one layer at a time, and a part of the head
            num_in_head = min(HEAD_OUTPUTS, text.vocab_size) * text.hidden_size
            loading = weights + BYTES_OF_CHECK * (self._num_in_checked_layer + num_in_head)
        elif is_packed and not is_tied:
            # the head, which is packed last, is held twice for a moment
            loading = max(loading, weights + num_embedded * size)
        cache = num_cached_tokens * self.cache_bytes_per_token
        return MemoryEstimate(self.name, weights, cache, num_cached_tokens, loading)

    @property
    def _num_in_checked_layer(self) -> int:
        """Number of weights of the largest layer, with one of its experts; others are checked one after the other."""
        sizes = Counter[str]()
        for name, shapes in weight_shapes(self.config).items():
            if (found := LAYER_NUMBER.match(name)) and OTHER_EXPERT.search(name) is None:
                sizes[found[0]] += max(map(math.prod, shapes))
        return max(sizes.values())

    def _bytes_saved(self, num_parameters: int, num_embedded: int, by_kernels: bool) -> float:
        """Return how many bytes fewer the weights take than in the compute dtype.

        Args:
            num_parameters: number of weights, with a head of its own if that is packed.
            num_embedded: weights of the input embeddings, which are not quantised.
            by_kernels: whether the kernels run the model as a whole.
        """
        size, stored_as = self.dtype.itemsize, self.weight_formats[0]
        if self.quantises_linears and not by_kernels:
            counts = self._linear_counts
            head = stored_as.head_format.bytes_per_weight
            if self._ties_embeddings:  # stored in addition to the embeddings
                return counts.in_layers * (size - stored_as.bytes_per_weight) - counts.in_head * head
            return counts.in_layers * (size - stored_as.bytes_per_weight) + counts.in_head * (size - head)
        if not stored_as.is_quantised or not (by_kernels or self.quantize is not None):
            return 0.0
        saved, size_of_others = 0.0, float(size)
        if not stored_as.keeps_others:
            num_rounded, size_of_others = num_parameters - num_embedded, stored_as.bytes_per_weight
            saved = num_rounded * size - self._quantised_bytes(num_rounded, stored_as)
        for each, count in self._num_stored.items() if by_kernels else ():
            if stored_as.keeps_others or each.bits <= stored_as.bits:
                saved += count * (size_of_others - each.bytes_per_weight)
        return saved

    def copy_bytes(self, weight_format: WeightFormat) -> int:
        """Return the bytes of a copy with weights in another encoding, in addition to this model's.

        Raises:
            UnsupportedModelError: if it cannot be copied.
        """
        if not self._can_be_copied:
            described = f"{self.name} (runtime {self.runtimes[0]}, {self.quantize or self.dtype_name})"
            raise quantised_copy_error(weight_format, described)
        if self.runtimes[0] == "transformers":
            return self._linear_counts.copy_bytes(weight_format)
        text = self.config.get_text_config()
        num_in_embeddings = text.vocab_size * text.hidden_size
        if self.runtimes[0] == "graphs":  # the head is shared, too
            num_shared = num_in_embeddings * (1 if self._ties_embeddings else 2)
            return int((self.num_parameters - num_shared) * weight_format.bytes_per_weight)
        num_shared = 0 if self._ties_embeddings else num_in_embeddings
        return self._quantised_bytes(self.num_parameters - num_shared, weight_format)

    @property
    def _can_be_copied(self) -> bool:
        """True if the kernels run this model in bfloat16, or graphs do, or most weights of its module can be quantised."""
        if self.runtimes[0] in ("native", "graphs"):
            return self.weight_formats == [BFLOAT16]
        stored = self.encoding is not None or getattr(self.config, "quantization_config", None) is not None
        is_module = self.runtimes[0] == "transformers" and self.quantize is None and not stored
        return is_module and can_quantise(self.device) and self._linear_counts.is_majority

    def has_room_for_copy(self, weight_format: WeightFormat) -> bool:
        """Return whether a copy of this model drafts by default and memory holds it in addition to the model.

        The copy must leave as much memory for longer KV caches as it takes itself. With graphs, where it gains less
        (docs/results.md, "On a GPU"), it drafts only on request.

        Args:
            weight_format: encoding of the copy's weights.
        """
        if not self._can_be_copied or self.runtimes[0] == "graphs":
            return False
        available = available_memory(self.device)
        copy = head_memory(self.name, self.copy_bytes(weight_format))
        return available is None or peak_memory([self.memory(), copy]) + copy.total <= available

    @property
    def num_parameters(self) -> int:
        """Number of weights, from headers."""
        count, encoding = self.files.count_parameters, self.encoding
        if encoding is None:
            return count()
        packed = count(encoding.codes) if encoding.has_codes else 0
        if encoding.scales is not None:
            packed += count(encoding.scales)
        return count() - packed + sum(self._num_stored.values())

    @property
    def _num_in_experts(self) -> int:
        """Number of weights of experts that a folder stores one by one."""
        source = self.files
        if not isinstance(source, FolderSource):
            return 0
        return sum(each.num_elements for name, each in source.headers.items() if EXPERT_NUMBER.search(name))

    @cached_property
    def _num_stored(self) -> dict[WeightFormat, int]:
        """Number of weights that the checkpoint stores in the kernels' encodings."""
        return self.files.count_stored(self.device)

    def _quantised_bytes(self, num_weights: int, weight_format: WeightFormat) -> int:
        """Return the bytes of the weights of all layers and the head."""
        text = self.config.get_text_config()
        num_in_head = text.vocab_size * text.hidden_size
        layers = (num_weights - num_in_head) * weight_format.bytes_per_weight
        return int(layers + num_in_head * weight_format.head_format.bytes_per_weight)

    def has_same_tokenizer(self, other: Checkpoint) -> bool:
        """Return whether each token has the same id for both models.

        Padding of the vocabulary (Qwen2.5: 151936 rows in small models, 152064 in large ones, one
        tokenizer) and tokens that were added to one of them are ignored.

        Raises:
            CheckpointError: if a tokenizer is missing or cannot be read.
        """
        return _vocabulary(self.tokenizer) == _vocabulary(other.tokenizer)


def check_loadable(config: Any, source: Source, device: torch.device) -> None:
    """Check, before any weight is read, that a model is causal and can be decoded speculatively.

    Raises:
        CheckpointError: if it is not a causal language model.
        UnsupportedModelError: if it cannot be decoded speculatively.
    """
    name = f"{source.path} ({config.model_type})"
    check_config(config, name)
    _check_quantisation(config, source, device)
    class_name = None
    if config.model_type not in FAMILIES:
        from secondguess.checkpoint.classes import class_of

        model_class = class_of(config)
        if model_class is None:
            raise CheckpointError(
                f"expected a causal language model, got {name}, which Transformers cannot load as one"
            )
        check_class(model_class, name)
        class_name = model_class.__name__
    architectures = config.architectures or []
    if (
        architectures
        and class_name not in architectures
        and not any(architecture.endswith(CAUSAL_SUFFIXES) for architecture in architectures)
    ):
        raise CheckpointError(
            f"expected a causal language model, got {name} whose weights are those of {', '.join(architectures)}"
        )


def _check_quantisation(config: Any, source: Source, device: torch.device) -> None:
    """Check that Transformers can decode the weights of a quantised checkpoint that is not decoded here."""
    described = _described_quantisation(config)
    if not described:
        if isinstance(source, FolderSource) and source.encoding(device) is None:
            with source.reading("a configuration"):
                source.require_unquantised()
        return
    try:
        with quiet():
            from transformers.quantizers import AutoHfQuantizer

            AutoHfQuantizer.from_config(described).validate_environment(device_map=None, weights_only=True)
    except Exception as error:
        # libraries that are not installed, processors, and unknown names raise errors of many kinds
        names = ("quant_method", "quant_algo", "format")
        found = " ".join(str(described[key]) for key in names if described.get(key))
        unnamed = f"quantization_config {shorten(str(described), MAX_REASON_LENGTH, placeholder=' ...')}"
        raise encoding_error(found or unnamed, str(error).splitlines()[0]) from error


def kept_quantisation(config: Any) -> str | None:
    """Return the name of the encoding whose weights Transformers keeps quantised; None without one."""
    method = _described_quantisation(config).get("quant_method")
    return None if method is None or method in DEQUANTISED else str(method)


def check_dtype_of_torchao(config: Any, dtype: torch.dtype, name: str) -> None:
    """Check that torchao multiplies the weights of a checkpoint, if they are its own, in a dtype.

    Raises:
        UnsupportedModelError: if it does not.
    """
    needed = dtype_for_torchao(config, dtype)
    if needed != dtype:
        expected, found = (str(each).removeprefix("torch.") for each in (needed, dtype))
        raise UnsupportedModelError(
            f"expected dtype {expected} for {name}, whose weights torchao multiplies in no other, got {found}; load it with "
            f"dtype {expected}"
        )


def dtype_for_torchao(config: Any, dtype: torch.dtype) -> torch.dtype:
    """Return the dtype for a checkpoint with weights of torchao: a given one, or the only one in which it multiplies them.

    Weights in 8-bit integers take all, except float64 if inputs are quantised, too; others take that of their scales.
    """
    described = _described_quantisation(config)
    if described.get("quant_method") != "torchao" or not isinstance(config.dtype, torch.dtype):
        return dtype
    kinds = described.get("quant_type")
    default = kinds.get("default") if isinstance(kinds, dict) else None
    kind = str(default.get("_type")) if isinstance(default, dict) else str(kinds)
    takes_all = kind.startswith("Int8") and not (dtype == torch.float64 and "Dynamic" in kind)
    return dtype if takes_all else config.dtype


def _described_quantisation(config: Any) -> dict[str, Any]:
    described = getattr(config, "quantization_config", None) or {}
    return dict(described if isinstance(described, dict) else described.to_dict())


def ties_embeddings(config: Any) -> bool:
    """Return whether the head shares the weights of the input embeddings.

    Transformers reads the outermost configuration of a vision-language model.
    """
    return bool(getattr(config, "tie_word_embeddings", False))


def pick_device(device: str) -> torch.device:
    """Return the torch device of a name; `auto` is the first CUDA device, or the CPU without one.

    Raises:
        BadInputError: if the device does not exist.
    """
    num_cuda = torch.cuda.device_count() if torch.cuda.is_available() else 0
    known = ["cpu", *(f"cuda:{index}" for index in range(num_cuda))]
    aliases = {"auto": known[min(num_cuda, 1)]} | ({"cuda": "cuda:0"} if num_cuda else {})
    name = aliases.get(device, device)
    if name not in known:
        advice = "; torch finds no CUDA device: see nvidia-smi, or install a CUDA build of torch"
        shown = advice if "cuda" in device and not num_cuda else ""
        raise BadInputError(f"expected device auto, {', '.join(known)}, got {device!r}{shown}")
    return torch.device(name)


def require_torchao() -> None:
    """Check that torchao is installed, which quantises modules that the kernels do not run.

    Raises:
        BadInputError: if it is not.
    """
    try:
        with quiet():
            import torchao  # noqa: F401 - only whether it is there
    except ImportError as error:
        raise BadInputError("quantize='int8' needs torchao; run `pip install secondguess[quant]`") from error


def _vocabulary(tokenizer: Any) -> dict[str, int]:
    added = tokenizer.get_added_vocab()
    return {token: index for token, index in tokenizer.get_vocab().items() if token not in added}
