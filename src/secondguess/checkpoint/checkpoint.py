"""Checkpoints with the settings of loading, resolved once, and the models loaded from them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from os import PathLike, fspath
from pathlib import Path
from typing import Any

import torch

from secondguess.checkpoint.codes import TokenCodes
from secondguess.checkpoint.gguf import count_stored
from secondguess.checkpoint.loaded import LoadedModel
from secondguess.checkpoint.memory import (
    MemoryEstimate,
    available_memory,
    check_memory,
    head_memory,
    peak_memory,
    return_freed_memory,
)
from secondguess.checkpoint.quantised import Encoding, read_encoding
from secondguess.checkpoint.read import (
    check_dtype_of_torchao,
    check_loadable,
    config_of_class,
    dtype_for_torchao,
    find_end_tokens,
    has_text,
    kept_quantisation,
    one_at_a_time,
    outline_of,
    pick_device,
    quantize_to_int8,
    read_config,
    read_module,
    read_processor,
    read_tokenizer,
    require_torchao,
    ties_embeddings,
)
from secondguess.checkpoint.resolve import check_dtype, check_quantization, check_runtime, find_checkpoint
from secondguess.checkpoint.weights import count_in_experts, count_parameters, is_gguf, tensor_files
from secondguess.errors import CheckpointError, UnsupportedModelError
from secondguess.runtime.base import quantised_copy_error
from secondguess.runtime.cached import CachedRuntime
from secondguess.runtime.families import why_not_fused
from secondguess.runtime.fused import FusedRuntime, fuse, fuse_for_kernels
from secondguess.runtime.graphs.runtime import to_graphs, why_not_graphs
from secondguess.runtime.native.decoder import why_not_native
from secondguess.runtime.native.runtime import NativeRuntime, to_native
from secondguess.runtime.packing import (
    LinearCounts,
    can_pack,
    can_pack_linears,
    can_quantise,
    count_linears,
    few_linears_error,
    pack_linears,
    quantise_linears,
)
from secondguess.runtime.support import (
    autocast_dtype,
    cached_layers,
    cached_values_per_token,
    context_length_of,
    has_bfloat16,
    without_defaults_of_caller,
)
from secondguess.runtime.transformers import remember
from secondguess.runtime.weight_format import (
    BFLOAT16,
    INT4,
    INT8,
    QUANTIZATIONS,
    STORED_INT4,
    STORED_INT8,
    WeightFormat,
)
from secondguess.runtime.wrap import wrap_module

DEFAULT_CONTEXT = 4096
"""Cached tokens, over all rows, that must fit into memory with the weights by default."""
BYTES_OF_READING = 8
"""Bytes per weight that are in use while a weight of a GGUF file is read: in float32, and converted."""


@dataclass(frozen=True, eq=False)
class Checkpoint:
    """Checkpoint of a causal language model with the settings of loading. Made by `resolve`.

    Args:
        name: name or path as given by the user.
        path: directory of the checkpoint, or its GGUF file; the name, for a model passed to `wrap_model` whose
            directory is unknown.
        config: the Transformers configuration.
        dtype: compute dtype, also with `quantize`.
        device: device of weights and caches.
        runtime, quantize, drafts: as in `resolve`.
        dtype_needs_kernels: True if bfloat16 was picked because the kernels run the model, on a
            processor on which it is slow otherwise.
    """

    name: str
    path: str
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
        picked = pick_device(device)
        path = find_checkpoint(fspath(name))
        config = read_config(path, picked)
        check_loadable(config, path, picked)
        needs_kernels = False
        if dtype == "auto":
            by_kernels = runtime in ("auto", "native") and not why_not_native(config, torch.bfloat16, picked)
            needs_kernels = by_kernels and not has_bfloat16(picked)
            fastest = torch.bfloat16 if by_kernels or has_bfloat16(picked) else torch.float32
            dtype = str(dtype_for_torchao(config, fastest)).removeprefix("torch.")
        check_dtype_of_torchao(config, getattr(torch, dtype), path)
        found = cls(
            fspath(name),
            path,
            config,
            getattr(torch, dtype),
            picked,
            runtime,
            quantize,
            drafts,
            needs_kernels,
        )
        by_kernels = "native" in found.runtimes  # raises an error if no runtime covers the model
        if quantize is not None and not by_kernels and not found._quantises_linears:
            require_torchao()
        return found

    @classmethod
    def from_module(cls, model: Any) -> Checkpoint:
        """Describe a model in memory, whose directory need not exist."""
        name = str(model.name_or_path)
        try:
            path = find_checkpoint(name) if name else name
        except CheckpointError:
            path = name
        return cls(name, path, model.config, model.dtype, model.device)

    @cached_property
    def runtimes(self) -> list[str]:
        """Runtimes that cover the model, in the order in which loading tries them.

        Raises:
            UnsupportedModelError: if there is none.
        """
        by_kernels = not why_not_native(self.config, self.dtype, self.device)
        covers = {
            "native": by_kernels,
            "fused": self.quantize is None and not why_not_fused(self.config, self.device),
            "graphs": self.quantize is None and not why_not_graphs(self.config, self.dtype, self.device),
            # after the kernels' refusal, loading checks it
            "transformers": (by_kernels and self.runtime == "auto") or self._module_runs,
        }
        found = [name for name, covered in covers.items() if covered and self.runtime in ("auto", name)]
        if not found:
            raise self._not_covered()
        return found

    @cached_property
    def encoding(self) -> Encoding | None:
        """Encoding of a quantised checkpoint that is decoded at loading; None for any other."""
        return read_encoding(Path(self.path), self.device)

    @property
    def weight_formats(self) -> list[WeightFormat]:
        """Encodings in which the kernels hold the weights, in the order in which loading tries them.

        A draft model whose probe fails in 8 bits is tried in bfloat16, still faster than elsewhere.
        """
        if self.quantize is not None:
            return [QUANTIZATIONS[self.quantize]]
        if self._num_stored:
            is_in_4_bits = any(each.bits <= INT4.bits for each in self._num_stored)
            return [STORED_INT4 if is_in_4_bits else STORED_INT8, BFLOAT16]
        return [INT8, BFLOAT16] if self.drafts else [BFLOAT16]

    def _not_covered(self) -> UnsupportedModelError:
        kept = kept_quantisation(self.config)
        if self.quantize is not None and kept is not None:
            return UnsupportedModelError(
                f"expected a checkpoint that is not quantised, for quantize={self.quantize!r}, got {self.name}, which is "
                f"already quantised ({kept}); load it without quantize"
            )
        if self._quantises_linears and self.runtime in ("auto", "transformers"):
            return few_linears_error(self.name, self._linear_counts)
        if self.quantize not in (None, INT8.name):
            reason = why_not_native(self.config, self.dtype, self.device)
            return UnsupportedModelError(
                f"expected a model that the compiled kernels run, for quantize={self.quantize!r}, got {self.name}"
                + (f" ({reason})" if reason else f" with runtime {self.runtime}")
                + "; use dtype bfloat16 and runtime auto, or quantize='int8'"
            )
        reasons = {"native": why_not_native, "graphs": why_not_graphs}
        why_not = reasons.get(self.runtime)
        reason = why_not(self.config, self.dtype, self.device) if why_not else None
        return UnsupportedModelError(
            f"expected a model that the {self.runtime} runtime covers, got a {self.config.model_type} "
            f"({self.dtype_name} on {self.device}, quantize {self.quantize}{f', {reason}' if reason else ''}); "
            "use runtime auto or transformers"
        )

    @property
    def is_packed(self) -> bool:
        """True if linear layers of modules are packed for the processor."""
        packs = can_pack_linears if self.runtimes[0] == "transformers" else can_pack
        return self.quantize is None and packs(self.dtype, self.device)

    @property
    def _quantises_linears(self) -> bool:
        """True if a module's linear layers are quantised for the kernels, by torchao otherwise."""
        return self.quantize is not None and can_quantise(self.device)

    @property
    def _module_runs(self) -> bool:
        """True if the Transformers module runs with this quantization."""
        if self.quantize is not None and kept_quantisation(self.config) is not None:
            return False
        if self._quantises_linears:
            return self._linear_counts.is_majority
        return self.quantize in (None, INT8.name)

    @cached_property
    def _ties_embeddings(self) -> bool:
        return ties_embeddings(config_of_class(self.config))

    @cached_property
    def _linear_counts(self) -> LinearCounts:
        return count_linears(outline_of(self.config, self.path))

    @cached_property
    def tokenizer(self) -> Any:
        """Tokenizer of the checkpoint; `TokenCodes` for a model of pixels, which has none.

        Raises:
            CheckpointError: if there is none, or it cannot be read.
        """
        if not has_text(self.config):
            return TokenCodes(self.name, self.config.vocab_size)
        return read_tokenizer(self.path)

    @cached_property
    def processor(self) -> Any:
        """Processor of a vision-language model.

        Raises:
            CheckpointError: if there is none, or it cannot be read.
        """
        return read_processor(self.path)

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
        num_parameters = self._num_parameters
        num_embedded = text.vocab_size * text.hidden_size
        loading = num_parameters * size
        stored = getattr(self.config, "dtype", None)
        if isinstance(stored, torch.dtype) and stored != self.dtype:
            # a tensor is read in the dtype of the file, and then converted
            loading += num_embedded * stored.itemsize
            if self.device.type == "cpu":
                # experts are converted one by one, and then joined; the allocator keeps what they have taken
                loading += count_in_experts(Path(self.path)) * size
        by_kernels = self.runtimes[0] == "native"
        if by_kernels and (is_gguf(self.path) or tensor_files(Path(self.path))):
            loading = 0  # layer by layer, from memory-mapped files
        is_packed, is_tied = by_kernels or self.is_packed, self._ties_embeddings
        if is_packed and is_tied:  # the head becomes a copy of its own
            num_parameters += num_embedded
        weights = int(num_parameters * size - self._bytes_saved(num_parameters, num_embedded, by_kernels))
        if is_packed and not is_tied:
            # the head, which is packed last, is held twice for a moment
            loading = max(loading, weights + num_embedded * size)
        if by_kernels and is_gguf(self.path):
            loading = max(loading, weights + BYTES_OF_READING * num_embedded)  # the head
        cache = num_cached_tokens * self.cache_bytes_per_token
        return MemoryEstimate(self.name, weights, cache, num_cached_tokens, loading)

    def _bytes_saved(self, num_parameters: int, num_embedded: int, by_kernels: bool) -> float:
        """Return how many bytes fewer the weights take than in the compute dtype.

        Args:
            num_parameters: number of weights, with a head of its own if that is packed.
            num_embedded: weights of the input embeddings, which are not quantised.
            by_kernels: whether the kernels run the model as a whole.
        """
        size, stored_as = self.dtype.itemsize, self.weight_formats[0]
        if self._quantises_linears and not by_kernels:
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
            return int((self._num_parameters - num_shared) * weight_format.bytes_per_weight)
        num_shared = 0 if self._ties_embeddings else num_in_embeddings
        return self._quantised_bytes(self._num_parameters - num_shared, weight_format)

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
        (docs/benchmarks.md, "On a GPU"), it drafts only on request.

        Args:
            weight_format: encoding of the copy's weights.
        """
        if not self._can_be_copied or self.runtimes[0] == "graphs":
            return False
        available = available_memory(self.device)
        copy = head_memory(self.name, self.copy_bytes(weight_format))
        return available is None or peak_memory([self.memory(), copy]) + copy.total <= available

    @property
    def _num_parameters(self) -> int:
        if self.encoding is None:
            return count_parameters(Path(self.path))
        packed = count_parameters(Path(self.path), self.encoding.codes) if self.encoding.has_codes else 0
        if self.encoding.scales is not None:
            packed += count_parameters(Path(self.path), self.encoding.scales)
        return count_parameters(Path(self.path)) - packed + sum(self._num_stored.values())

    @cached_property
    def _num_stored(self) -> dict[WeightFormat, int]:
        """Number of weights that the checkpoint stores in the kernels' encodings."""
        if is_gguf(self.path):
            return count_stored(Path(self.path))
        if self.encoding is None or not self.encoding.has_codes:
            return {}
        stored_as = self.encoding.weight_format
        num_codes = count_parameters(Path(self.path), self.encoding.codes) * (
            self.encoding.word // self.encoding.bits
        )
        return {stored_as: num_codes}

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

    def read_module(self, layer_by_layer: bool = False) -> Any:
        """Return the Transformers module with its weights, on the device.

        Args:
            layer_by_layer: as in `read.read_module`; for the kernels only.

        Raises:
            CheckpointError: if weights are missing or cannot be read.
        """
        module = read_module(self.path, self.dtype, layer_by_layer, self.device).to(self.device).eval()
        return_freed_memory()
        return module

    @one_at_a_time()
    def load(self) -> LoadedModel:
        """Load the model and its tokenizer.

        Raises:
            CheckpointError: if weights or tokenizer are missing or broken.
            UnsupportedModelError: if the requested runtime does not reproduce the model's logits.
            OutOfMemoryError: if weights and cache would not fit; nothing has been allocated.
        """
        check_memory([self.memory()], self.device)
        tokenizer = self.tokenizer
        model = self.read_module(layer_by_layer=self.runtimes[0] == "native")
        end_tokens, models = find_end_tokens(model, tokenizer), [model]
        del model  # `make_runtime` frees it when it fails its check
        try:
            runtime = self.make_runtime(models.pop(), self._read_again)
        except FloatingPointError as error:
            raise CheckpointError(
                f"expected weights that give numbers as logits in {self.path}, got NaN; copy or download the checkpoint again"
            ) from error
        if self.dtype_needs_kernels and not isinstance(runtime, NativeRuntime):
            del runtime
            return replace(self, dtype=torch.float32, dtype_needs_kernels=False).load()
        return LoadedModel(self, runtime, tokenizer, end_tokens)

    def _read_again(self) -> Any:
        """Return the whole module with its weights, after a runtime has failed its check.

        Raises:
            CheckpointError: if weights are missing or cannot be read.
            OutOfMemoryError: if the weights would not fit as they are, not in the encoding that was tried first.
        """
        return_freed_memory()  # of the module that failed
        check_memory([replace(self, runtime="transformers").memory()], self.device)
        return self.read_module()

    def make_runtime(self, model: Any, reload_model: Callable[[], Any]) -> CachedRuntime:
        """Return the first of `runtimes` that reproduces the module's logits.

        Args:
            model: the module; it must not be used by the caller afterwards.
            reload_model: returns another copy of the module, for use after a probe has failed.

        Raises:
            UnsupportedModelError: if there is none.
        """
        attempts = [
            (name, weight_format)
            for name in self.runtimes
            for weight_format in (self.weight_formats if name == "native" else [BFLOAT16])
        ]
        for number, (name, weight_format) in enumerate(attempts):
            if number:
                model = reload_model()
            runtime = self._try_runtime(name, weight_format, model)
            if runtime is not None:
                return runtime
            del model  # before another copy is read
        raise self._not_covered()

    def _try_runtime(self, name: str, weight_format: WeightFormat, model: Any) -> CachedRuntime | None:
        """Return a runtime of a module; None if it does not reproduce the module's logits.

        Args:
            name: name of the runtime.
            weight_format: encoding of the weights for the kernels.
            model: as in `make_runtime`.
        """
        if name == "native":
            checked = fuse_for_kernels(model.eval())
            native = to_native(checked, weight_format) if checked else None
            return None if native is None else NativeRuntime(native)
        if name == "fused":
            fused = fuse(model.eval(), can_pack(self.dtype, self.device))
            return None if fused is None else FusedRuntime(fused)
        if name == "graphs":
            checked = fuse_for_kernels(model.eval())
            return to_graphs(checked) if checked else None
        if self._quantises_linears:
            quantise_linears(model.eval(), QUANTIZATIONS[str(self.quantize)])
        elif self.quantize is not None:
            quantize_to_int8(model)
        elif can_pack_linears(self.dtype, self.device):
            pack_linears(model)
        return wrap_module(model)


@contextmanager
def wrap_model(model: Any) -> Iterator[LoadedModel]:
    """Wrap the user's own model as a `LoadedModel` and restore the model when the context ends.

    The model's passes run under the caller's `torch.autocast`; everything else in the context runs without.
    """
    dtype, restore = autocast_dtype(model.device), remember(model)
    try:
        with without_defaults_of_caller(model.device), wrap_module(model) as runtime:
            runtime.autocast_dtype = dtype
            checkpoint = replace(Checkpoint.from_module(model), runtime="transformers")
            yield LoadedModel(checkpoint, runtime, None, find_end_tokens(model, tokenizer=None))
    except BaseException:  # Ctrl-C may come before or after the runtime's own context
        restore()
        raise


def _vocabulary(tokenizer: Any) -> dict[str, int]:
    added = tokenizer.get_added_vocab()
    return {token: index for token, index in tokenizer.get_vocab().items() if token not in added}
