"""Loading of models by name or path, with clear errors. Never accesses the network."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from secondguess.errors import BadInputError, CheckpointError, SecondGuessError, UnsupportedModelError
from secondguess.runtime.cached import CachedRuntime
from secondguess.runtime.families import can_fuse
from secondguess.runtime.fused import FusedRuntime, fuse
from secondguess.runtime.memory import MemoryEstimate, check_memory, count_parameters, estimate_memory
from secondguess.runtime.native.decoder import can_run_native
from secondguess.runtime.native.runtime import NativeRuntime, to_native
from secondguess.runtime.packing import can_pack, pack_linears
from secondguess.runtime.quiet import quiet
from secondguess.runtime.resolve import DTYPE_NAMES, check_dtype, check_quantization_name
from secondguess.runtime.resolve import check_runtime as check_runtime
from secondguess.runtime.resolve import find_checkpoint as find_checkpoint
from secondguess.runtime.support import check_class, check_config, has_bfloat16
from secondguess.runtime.transformers import TransformersRuntime

with quiet():
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING
    from transformers.utils import logging as transformers_logging

DTYPES: dict[str, torch.dtype] = {name: getattr(torch, name) for name in DTYPE_NAMES}
CAUSAL_SUFFIXES = ("ForCausalLM", "LMHeadModel", "ForConditionalGeneration")


@dataclass(frozen=True)
class LoadedModel:
    """Model ready for decoding, with the settings chosen while loading it.

    Attributes:
        runtime: the model; see `runtime.base.Runtime`.
        kind: name of the runtime, one of `resolve.RUNTIMES` except `auto`.
        tokenizer: a Transformers tokenizer; None for a model passed to `wrap_model`.
        name: name or path as given by the user.
        path: directory of the checkpoint; the name, for a model passed to `wrap_model` whose
            directory is unknown.
        dtype: compute dtype, also with `quantize`: `float64`, `float32`, `bfloat16` or `float16`.
        device: such as `cpu` or `cuda:0`.
        quantize: `int8`, or None.
        end_tokens: end-of-sequence tokens, from the generation configuration or else the model
            configuration or the tokenizer.
    """

    runtime: CachedRuntime
    kind: str
    tokenizer: Any
    name: str
    path: str
    dtype: str
    device: str
    quantize: str | None
    end_tokens: frozenset[int]

    def encode(self, text: str) -> list[int]:
        """Return the token ids of a text, with the special tokens that the tokenizer adds."""
        ids: list[int] = self.tokenizer(text, verbose=False).input_ids
        return ids

    @property
    def runtime_description(self) -> str:
        """Name of the runtime, with a note if the kernels hold weights in 8 bits."""
        rounded = isinstance(self.runtime, NativeRuntime) and self.runtime.decoder.eight_bits
        return f"{self.kind}, weights in 8 bits" if rounded else self.kind

    def module(self) -> Any:
        """Return the Transformers module whose distribution the runtime reproduces.

        It is the module that the runtime runs, or else a second copy loaded into memory.

        Raises:
            UnsupportedModelError: if the kernels quantised the weights, which no module
                reproduces.
        """
        if isinstance(self.runtime, NativeRuntime) and self.runtime.decoder.eight_bits:
            raise UnsupportedModelError(
                f"expected a model that a Transformers module computes, got {self.name} with weights in 8 bits of our own; "
                "load it without quantize, or with runtime transformers"
            )
        if isinstance(self.runtime, TransformersRuntime):
            return self.runtime.model
        return _read_model(self.path, DTYPES[self.dtype]).to(self.device).eval()


def load_runtime(
    name_or_path: str | Path,
    *,
    dtype: str = "auto",
    device: str = "auto",
    quantize: str | None = None,
    runtime: str = "auto",
    num_cached_tokens: int = 4096,
    drafts: bool = False,
) -> LoadedModel:
    """Load a causal language model and its tokenizer.

    Args:
        name_or_path: a directory, a repository in the local Hugging Face cache, or a built-in
            model (`builtin` or `builtin-draft`).
        dtype: `auto` (see `pick_dtype`), `float64`, `float32`, `bfloat16` or `float16`.
        device: `auto` (see `pick_device`), `cpu`, `cuda` or `cuda:N`.
        quantize: `int8` keeps the weights of linear layers in 8 bits, quantised by the kernels if
            they run the model, else by torchao.
        runtime: `native` (compiled kernels, see `runtime.native`), `fused` (torch, see
            `runtime.fused`), `transformers` (the module), or `auto`: the first of them that covers
            the model and reproduces the module's logits.
        num_cached_tokens: cached tokens, over all rows, that must fit into memory beside the
            weights.
        drafts: whether the model is used for drafting only. The kernels, if they run it, then
            quantise its weights to 8 bits, which is faster and changes probabilities slightly.

    Raises:
        BadInputError: if the dtype, device, quantization or runtime is not available.
        CheckpointError: if the checkpoint is missing, broken or of the wrong kind.
        UnsupportedModelError: if the model cannot be decoded speculatively, or not by this
            runtime.
        OutOfMemoryError: if weights and cache would not fit; nothing has been allocated.
    """
    place = pick_device(device)
    path = find_checkpoint(str(name_or_path))
    config = read_config(path)
    number = pick_dtype(dtype, place, config, runtime)
    check_quantization(
        quantize, by_kernels=runtime != "transformers" and can_run_native(config, number, place)
    )
    check_loadable(config, path)
    need = _need(name_or_path, path, config, number, place, quantize, num_cached_tokens, drafts, runtime)
    check_memory([need], place)
    tokenizer = read_tokenizer(path)
    model = _read_model(path, number).to(place)
    end_tokens = _end_tokens(model, tokenizer)
    made = make_runtime(
        model,
        lambda: _read_model(path, number).to(place),
        runtime,
        quantize=quantize,
        drafts=drafts,
    )
    if (
        dtype == "auto"
        and _kind_of(made) != "native"
        and number == torch.bfloat16
        and not has_bfloat16(place)
    ):
        # bfloat16 is only fast here with the kernels, and the probe rejected them for this model.
        del made, model
        return load_runtime(
            name_or_path,
            dtype="float32",
            device=device,
            quantize=quantize,
            runtime=runtime,
            num_cached_tokens=num_cached_tokens,
            drafts=drafts,
        )
    return LoadedModel(
        made,
        _kind_of(made),
        tokenizer,
        str(name_or_path),
        path,
        str(number).removeprefix("torch."),
        str(place),
        quantize,
        end_tokens,
    )


def make_runtime(
    model: Any,
    reload_model: Callable[[], Any],
    kind: str = "auto",
    *,
    quantize: str | None = None,
    drafts: bool = False,
) -> CachedRuntime:
    """Return a runtime for a loaded model; with `auto` the fastest that reproduces its logits.

    Args:
        model: a causal language model; it must not be used by the caller afterwards.
        reload_model: loads another copy of the model, for use after a probe has failed.
        kind: name of the runtime, as in `load_runtime`.
        quantize, drafts: as in `load_runtime`.

    Raises:
        BadInputError: if the runtime does not exist.
        UnsupportedModelError: if this runtime, or any, cannot decode the model.
    """
    check_runtime(kind)
    dtype, place = model.dtype, model.device
    packable = quantize is None and can_pack(dtype, place)
    if kind in ("auto", "native") and can_run_native(model.config, dtype, place):
        # A draft model whose probe fails in 8 bits is tried in bfloat16, still faster than
        # elsewhere.
        for eight_bits in [drafts or quantize is not None, *([False] if drafts and quantize is None else [])]:
            unpacked = fuse(model.eval(), packed=False)
            native = to_native(unpacked, eight_bits) if unpacked else None
            if native is not None:
                return NativeRuntime(native)
            model = reload_model()
    if kind in ("auto", "fused") and quantize is None and can_fuse(model.config, place):
        decoder = fuse(model.eval(), packable)
        if decoder is not None:
            return FusedRuntime(decoder)
        if kind == "auto":
            model = reload_model()
    if kind in ("native", "fused"):
        raise not_covered(kind, model.config, dtype, place, quantize)
    if quantize is not None:
        check_quantization(quantize)
        _quantize_to_int8(model)
    elif packable:
        pack_linears(model)
    return TransformersRuntime(model)


def not_covered(
    kind: str, config: Any, dtype: torch.dtype, place: torch.device, quantize: str | None
) -> UnsupportedModelError:
    """Return the error for a model that the requested runtime does not cover."""
    return UnsupportedModelError(
        f"expected a model that the {kind} runtime covers, got a {config.model_type} "
        f"({str(dtype).removeprefix('torch.')} on {place}, quantize {quantize}); use runtime auto or transformers"
    )


def estimate_load_memory(
    name_or_path: str | Path,
    *,
    dtype: str = "auto",
    device: str = "auto",
    quantize: str | None = None,
    num_cached_tokens: int = 4096,
    drafts: bool = False,
    runtime: str = "auto",
) -> MemoryEstimate:
    """Return the memory that `load_runtime` with these arguments would take.

    Allows several models to be checked together (`memory.check_memory`).
    """
    path = find_checkpoint(str(name_or_path))
    place = pick_device(device)
    config = read_config(path)
    number = pick_dtype(dtype, place, config, runtime)
    check_loadable(config, path)
    return _need(name_or_path, path, config, number, place, quantize, num_cached_tokens, drafts, runtime)


@contextmanager
def wrap_model(model: Any) -> Iterator[LoadedModel]:
    """Wrap the user's own model as a `LoadedModel` and restore the model when the context ends."""
    with TransformersRuntime(model) as runtime:
        name = str(model.name_or_path)
        dtype = str(model.dtype).removeprefix("torch.")
        yield LoadedModel(
            runtime,
            "transformers",
            None,
            name,
            _directory_of(name),
            dtype,
            str(model.device),
            None,
            _end_tokens(model, tokenizer=None),
        )


def _directory_of(name: str) -> str:
    """Return the directory of a model of this name, or the name itself if there is none."""
    try:
        return find_checkpoint(name) if name else name
    except CheckpointError:
        return name


def check_vocabularies(target: LoadedModel, drafter: LoadedModel) -> None:
    """Check that a token id means the same to both models.

    Raises:
        CheckpointError: if the tokenizers differ.
    """
    own, other = (model.tokenizer or read_tokenizer(model.path) for model in (target, drafter))
    check_tokenizers(target.name, own, drafter.name, other)


def check_tokenizers(target: str, own: Any, drafter: str, other: Any) -> None:
    """Check that the tokenizers of a target and of a drafter give each token the same id.

    Padding of the vocabulary (Qwen2.5: 151936 rows in small models, 152064 in large ones, one
    tokenizer) and tokens that were added to one of them are ignored.

    Args:
        target, drafter: names of the models, for the error message.
        own, other: tokenizers of the target and of the drafter.

    Raises:
        CheckpointError: if the tokenizers differ.
    """
    known, guessed = _vocabulary(own), _vocabulary(other)
    if known == guessed:
        return
    differing = next(iter(sorted(known.items() ^ guessed.items(), key=lambda item: item[1])))
    raise CheckpointError(
        f"expected a drafter that shares the target's tokenizer, got vocabularies of {len(guessed)} tokens "
        f"({drafter}) and {len(known)} tokens ({target}) that differ, first at token {differing[1]}; "
        "choose a drafter of the same model family"
    )


def pick_device(device: str) -> torch.device:
    """Return the torch device of a name.

    `auto` is the first CUDA device if there is one, else the CPU.

    Raises:
        BadInputError: if the device does not exist.
    """
    num_cuda = torch.cuda.device_count() if torch.cuda.is_available() else 0
    known = ["cpu", *(f"cuda:{index}" for index in range(num_cuda))]
    if device == "auto":
        return torch.device(known[1] if num_cuda else "cpu")
    if device == "cuda" and num_cuda:
        return torch.device("cuda:0")
    if device not in known:
        raise BadInputError(f"expected device auto, {', '.join(known)}, got {device!r}")
    return torch.device(device)


def pick_dtype(dtype: str, device: torch.device, config: Any, runtime: str = "auto") -> torch.dtype:
    """Return the torch dtype of a name.

    `auto` is bfloat16 if the hardware multiplies in bfloat16 or the kernels run the model, else
    float32.

    Raises:
        BadInputError: if the dtype is unknown.
    """
    if dtype == "auto":
        by_kernels = runtime in ("auto", "native") and can_run_native(config, torch.bfloat16, device)
        return torch.bfloat16 if by_kernels or has_bfloat16(device) else torch.float32
    check_dtype(dtype)
    return DTYPES[dtype]


def check_quantization(quantize: str | None, by_kernels: bool = False) -> None:
    """Check that a quantization is available.

    Args:
        quantize: name of the quantization, or None.
        by_kernels: whether the kernels quantise the model, so that torchao is not needed.

    Raises:
        BadInputError: if the name is unknown, or torchao is needed and missing.
    """
    check_quantization_name(quantize)
    if quantize is None or by_kernels:
        return
    try:
        with quiet():
            import torchao  # noqa: F401 - only whether it is there
    except ImportError as error:
        raise BadInputError("quantize='int8' needs torchao; run `pip install secondguess[quant]`") from error


def read_config(path: str) -> Any:
    """Return the configuration of a checkpoint directory.

    Raises:
        CheckpointError: if it cannot be read.
    """
    try:
        with quiet():
            raw = json.loads((Path(path) / "config.json").read_bytes())
            if not isinstance(raw, dict):
                raise ValueError("not a JSON object")
            return AutoConfig.from_pretrained(path, local_files_only=True)
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise _broken(path, "configuration", error) from error


def check_loadable(config: Any, path: str) -> None:
    """Check, before any weight is read, that a model is causal and can be decoded speculatively.

    Raises:
        CheckpointError: if it is not a causal language model.
        UnsupportedModelError: if it cannot be decoded speculatively.
    """
    name = f"{path} ({config.model_type})"
    check_config(config, name)
    if type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        raise CheckpointError(
            f"expected a causal language model, got {name}, which Transformers cannot load as one"
        )
    model_class = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
    check_class(model_class, name)
    architectures = config.architectures or [model_class.__name__]
    if not any(architecture.endswith(CAUSAL_SUFFIXES) for architecture in architectures):
        raise CheckpointError(
            f"expected a causal language model, got {name} whose weights are those of {', '.join(architectures)}"
        )


def read_tokenizer(path: str) -> Any:
    """Return the tokenizer in a checkpoint directory.

    Raises:
        CheckpointError: if there is none, or it cannot be read.
    """
    try:
        with quiet():
            tokenizer = AutoTokenizer.from_pretrained(path, local_files_only=True)
    except (
        Exception
    ) as error:  # the tokenizers library raises bare exceptions for a file that it cannot parse
        raise _broken(path, "tokenizer", error) from error
    if len(tokenizer.get_vocab()) <= len(tokenizer.get_added_vocab()):
        raise _broken(path, "tokenizer", "it has no tokens of its own")
    return tokenizer


def _read_model(path: str, dtype: torch.dtype) -> Any:
    bars = transformers_logging.is_progress_bar_enabled()
    transformers_logging.disable_progress_bar()
    try:
        with quiet():
            model, found = AutoModelForCausalLM.from_pretrained(
                path, dtype=dtype, local_files_only=True, output_loading_info=True
            )
    except SecondGuessError:
        raise
    except Exception as error:  # unreadable weights raise exceptions of many libraries and kinds
        raise _broken(path, "weights", error) from error
    finally:
        if bars:
            transformers_logging.enable_progress_bar()
    if found["missing_keys"]:
        missing = sorted(found["missing_keys"])
        raise _broken(path, "weights", f"{len(missing)} tensors are missing, such as {missing[0]}")
    return model


def _quantize_to_int8(model: Any) -> None:
    """Quantise weights to int8 with one scale per output channel, except a tied head."""
    with quiet():
        from torchao.quantization import Int8WeightOnlyConfig, quantize_

        quantize_(model, Int8WeightOnlyConfig(), filter_fn=_is_quantizable(model))


def _is_quantizable(model: Any) -> Any:
    shared = model.get_input_embeddings().weight

    def choose(module: torch.nn.Module, _: str) -> bool:
        return isinstance(module, torch.nn.Linear) and module.weight is not shared

    return choose


def _kind_of(runtime: CachedRuntime) -> str:
    if isinstance(runtime, NativeRuntime):
        return "native"
    return "fused" if isinstance(runtime, FusedRuntime) else "transformers"


def _need(
    name: str | Path,
    path: str,
    config: Any,
    dtype: torch.dtype,
    place: torch.device,
    quantize: str | None,
    num_cached_tokens: int,
    drafts: bool,
    runtime: str,
) -> MemoryEstimate:
    num_parameters = count_parameters(Path(path))
    if num_parameters is None:
        # weights in the older pickle format, which rarely take more than two bytes each
        num_parameters = sum(file.stat().st_size for file in Path(path).glob("*.bin")) // 2
    by_kernels = runtime in ("auto", "native") and can_run_native(config, dtype, place)
    return estimate_memory(
        str(name),
        config,
        num_parameters,
        dtype,
        quantized=quantize is not None or (drafts and by_kernels),
        packed=by_kernels or (quantize is None and can_pack(dtype, place)),
        num_cached_tokens=num_cached_tokens,
    )


def _end_tokens(model: Any, tokenizer: Any) -> frozenset[int]:
    candidates = [model.generation_config.eos_token_id, model.config.get_text_config().eos_token_id]
    if tokenizer is not None:
        candidates.append(tokenizer.eos_token_id)
    ends = next((found for found in candidates if found is not None), ())
    return frozenset([ends] if isinstance(ends, int) else ends)


def _vocabulary(tokenizer: Any) -> dict[str, int]:
    added = tokenizer.get_added_vocab()
    return {token: index for token, index in tokenizer.get_vocab().items() if token not in added}


def _broken(path: str, part: str, reason: object) -> CheckpointError:
    lines = [line.strip() for line in str(reason).splitlines() if line.strip()] or [type(reason).__name__]
    return CheckpointError(f"expected a readable {part} in {path}, got: {lines[0]}")
