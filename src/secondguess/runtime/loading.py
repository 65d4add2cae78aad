"""From a name or a path to a runtime, or one clear line that says why not. Never the network."""

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
from secondguess.runtime.memory import MemoryNeed, check_memory, count_parameters, estimate_memory
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
    """A model ready to decode, with everything that was decided while loading it.

    Attributes:
        runtime: the model; its contract is `runtime.base`.
        kind: which runtime that is, one of `resolve.RUNTIMES` but `auto`.
        tokenizer: a Transformers tokenizer; None for a borrowed model.
        name: what the user called it.
        path: the directory it was read from; of a borrowed model that came from none that is known, its name.
        dtype: `float64`, `float32`, `bfloat16` or `float16`; what computes, also under `quantize`.
        device: such as `cpu` or `cuda:0`.
        quantize: `int8`, or None.
        end_tokens: tokens after which the model's generation configuration says to stop.
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
        """Token ids of a text, with the special tokens that the tokenizer puts around one."""
        ids: list[int] = self.tokenizer(text, verbose=False).input_ids
        return ids

    @property
    def runtime_in_words(self) -> str:
        """The kind of runtime, and whether it rounds weights."""
        rounded = isinstance(self.runtime, NativeRuntime) and self.runtime.decoder.eight_bits
        return f"{self.kind}, weights in 8 bits" if rounded else self.kind

    def module(self) -> Any:
        """The Transformers module whose law the runtime keeps: the one that runs, or else a second copy in memory.

        Raises:
            UnsupportedModelError: there is none, because the kernels rounded the weights to 8 bits themselves.
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
    """Load a causal language model and its tokenizer from a directory, the Hugging Face cache, or the box.

    Args:
        name_or_path: a directory, a repository in the local Hugging Face cache, `builtin` or `builtin-draft`.
        dtype: `auto` (see `pick_dtype`), `float64`, `float32`, `bfloat16` or `float16`.
        device: `auto` (see `pick_device`), `cpu`, `cuda` or `cuda:N`.
        quantize: `int8` keeps the linear layers' weights in 8 bits: ours where the kernels run the model, else torchao's.
        runtime: `native` (compiled kernels, see `runtime.native`), `fused` (torch, see `runtime.fused`),
            `transformers` (the module), or `auto`: the first of them that covers the model and says the same.
        num_cached_tokens: cached tokens, over all rows, that must fit into memory beside the weights.
        drafts: whether the model only drafts, so that its law may be off by a rounding where that is faster.

    Raises:
        BadInputError: a dtype, device, quantization or runtime that does not exist here.
        CheckpointError: a checkpoint that is missing, broken or of the wrong kind.
        UnsupportedModelError: a model that cannot be decoded speculatively, or not by the runtime asked for.
        OutOfMemoryError: weights and cache would not fit; nothing was allocated.
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
        # The kernels were what made bfloat16 fast here, and a probe found that they say something else.
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
    read_again: Callable[[], Any],
    kind: str = "auto",
    *,
    quantize: str | None = None,
    drafts: bool = False,
) -> CachedRuntime:
    """The runtime of this kind for a loaded model, or with `auto` the fastest that says what the module says.

    Args:
        model: a causal language model; it is taken apart or packed.
        read_again: gives a copy of it, for when the fused form has to be given up.
        kind, quantize, drafts: as in `load_runtime`.

    Raises:
        BadInputError: no such runtime.
        UnsupportedModelError: a model that this runtime, or any, cannot decode.
    """
    check_runtime(kind)
    dtype, place = model.dtype, model.device
    packable = quantize is None and can_pack(dtype, place)
    if kind in ("auto", "native") and can_run_native(model.config, dtype, place):
        # A draft model that 8 bits do not suit is still faster here than elsewhere.
        for eight_bits in [drafts or quantize is not None, *([False] if drafts and quantize is None else [])]:
            unpacked = fuse(model.eval(), packed=False)
            native = to_native(unpacked, eight_bits) if unpacked else None
            if native is not None:
                return NativeRuntime(native)
            model = read_again()
    if kind in ("auto", "fused") and quantize is None and can_fuse(model.config, place):
        decoder = fuse(model.eval(), packable)
        if decoder is not None:
            return FusedRuntime(decoder)
        if kind == "auto":
            model = read_again()
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
    """What to raise of a model for which a runtime of this kind was asked in vain."""
    return UnsupportedModelError(
        f"expected a model that the {kind} runtime covers, got a {config.model_type} "
        f"({str(dtype).removeprefix('torch.')} on {place}, quantize {quantize}); use runtime auto or transformers"
    )


def memory_need(
    name_or_path: str | Path,
    *,
    dtype: str = "auto",
    device: str = "auto",
    quantize: str | None = None,
    num_cached_tokens: int = 4096,
    drafts: bool = False,
    runtime: str = "auto",
) -> MemoryNeed:
    """What `load_runtime` with these arguments would take, so that several models can be checked together."""
    path = find_checkpoint(str(name_or_path))
    place = pick_device(device)
    config = read_config(path)
    number = pick_dtype(dtype, place, config, runtime)
    check_loadable(config, path)
    return _need(name_or_path, path, config, number, place, quantize, num_cached_tokens, drafts, runtime)


@contextmanager
def borrow_model(model: Any) -> Iterator[LoadedModel]:
    """The user's own model as a `LoadedModel`; given back as it was found when the context ends."""
    with TransformersRuntime(model) as runtime:
        name = str(model.name_or_path)
        dtype = str(model.dtype).removeprefix("torch.")
        yield LoadedModel(
            runtime,
            "transformers",
            None,
            name,
            _folder_of(name),
            dtype,
            str(model.device),
            None,
            _end_tokens(model, tokenizer=None),
        )


def _folder_of(name: str) -> str:
    """Where Transformers read a model of this name; the name itself if it lies nowhere (any more)."""
    try:
        return find_checkpoint(name) if name else name
    except CheckpointError:
        return name


def check_vocabularies(target: LoadedModel, drafter: LoadedModel) -> None:
    """Require that a token id means the same to both models.

    Raises:
        CheckpointError: two tokenizers.
    """
    own, other = (model.tokenizer or read_tokenizer(model.path) for model in (target, drafter))
    check_tokenizers(target.name, own, drafter.name, other)


def check_tokenizers(target: str, own: Any, drafter: str, other: Any) -> None:
    """Require that the tokenizers of a target and of a drafter, both by name, give a token the same id.

    Padding of the vocabulary (Qwen2.5: 151936 rows in small models, 152064 in large ones, one tokenizer) and
    tokens that were added to one of them do not matter.

    Raises:
        CheckpointError: two tokenizers.
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
    """`auto` is the first CUDA device where there is one, else the CPU."""
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
    """`auto` is bfloat16 where the processor multiplies it in hardware or our kernels run the model, else float32."""
    if dtype == "auto":
        by_kernels = runtime in ("auto", "native") and can_run_native(config, torch.bfloat16, device)
        return torch.bfloat16 if by_kernels or has_bfloat16(device) else torch.float32
    check_dtype(dtype)
    return DTYPES[dtype]


def check_quantization(quantize: str | None, by_kernels: bool = False) -> None:
    """Refuse unknown names, and known ones whose library is missing where our kernels will not do it."""
    check_quantization_name(quantize)
    if quantize is None or by_kernels:
        return
    try:
        with quiet():
            import torchao  # noqa: F401 - only whether it is there
    except ImportError as error:
        raise BadInputError("quantize='int8' needs torchao; run `pip install secondguess[quant]`") from error


def read_config(path: str) -> Any:
    """The configuration of a checkpoint directory."""
    try:
        with quiet():
            raw = json.loads((Path(path) / "config.json").read_bytes())
            if not isinstance(raw, dict):
                raise ValueError("not a JSON object")
            return AutoConfig.from_pretrained(path, local_files_only=True)
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise _broken(path, "configuration", error) from error


def check_loadable(config: Any, path: str) -> None:
    """Refuse, before any weight is read, what is not a causal language model or cannot be speculated on."""
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
    """The tokenizer in a checkpoint directory.

    Raises:
        CheckpointError: none there, or one that cannot be read.
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
    except Exception as error:  # safetensors, torch and Transformers raise many kinds for unreadable weights
        raise _broken(path, "weights", error) from error
    finally:
        if bars:
            transformers_logging.enable_progress_bar()
    if found["missing_keys"]:
        missing = sorted(found["missing_keys"])
        raise _broken(path, "weights", f"{len(missing)} tensors are missing, such as {missing[0]}")
    return model


def _quantize_to_int8(model: Any) -> None:
    """Weight-only int8, one scale per output channel; a head that is tied to the embeddings stays as it is."""
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
) -> MemoryNeed:
    num_parameters = count_parameters(Path(path))
    if num_parameters is None:
        # Weights in the older pickle format; they are rarely wider than two bytes a number.
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
