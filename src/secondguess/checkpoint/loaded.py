"""Models that are loaded and ready for decoding."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from secondguess.errors import UnsupportedModelError
from secondguess.runtime.cached import CachedRuntime
from secondguess.runtime.native.linear import KernelLinear
from secondguess.runtime.native.runtime import NativeRuntime
from secondguess.runtime.weight_format import QUANTIZATIONS

if TYPE_CHECKING:
    from secondguess.checkpoint.plan import Checkpoint


@dataclass(frozen=True)
class LoadedModel:
    """Model ready for decoding.

    Attributes:
        checkpoint: the checkpoint, with the settings in use.
        runtime: the model; see `runtime.base.Runtime`.
        tokenizer: a Transformers tokenizer; None for a model passed to `wrap_model`.
        end_tokens: end-of-sequence tokens, from the generation configuration or else the model
            configuration or the tokenizer.
    """

    checkpoint: Checkpoint
    runtime: CachedRuntime
    tokenizer: Any
    end_tokens: frozenset[int]

    @property
    def name(self) -> str:
        return self.checkpoint.name

    @property
    def path(self) -> str:
        return self.checkpoint.path

    @property
    def dtype(self) -> str:
        return self.checkpoint.dtype_name

    @property
    def device(self) -> str:
        """Device, such as `cpu` or `cuda:0`."""
        return str(self.checkpoint.device)

    @property
    def kind(self) -> str:
        """Name of the runtime in use, one of `resolve.RUNTIMES` except `auto`."""
        return self.runtime.kind

    @property
    def runtime_description(self) -> str:
        """Name of the runtime, with the bits of quantised weights, or if it runs each row by itself."""
        parts = [self.kind, *([self.runtime.description] if self.runtime.description else [])]
        if (bits := self._quantised_bits) is not None:
            parts.append(f"weights in {bits} bits")
        return ", ".join(parts)

    @property
    def _quantised_bits(self) -> int | None:
        """Bits per weight if the weights are quantised, by us or as the kernels have read them."""
        if isinstance(self.runtime, NativeRuntime):
            weight_format = self.runtime.decoder.weight_format
            return weight_format.bits if weight_format.is_quantised else None
        quantize = self.checkpoint.quantize
        return None if quantize is None else QUANTIZATIONS[quantize].bits

    @property
    def num_input_tokens(self) -> int:
        """Number of token ids that a text may have."""
        return self.runtime.num_input_tokens

    @property
    def takes_images(self) -> bool:
        return self.runtime.takes_images

    def encode(self, text: str) -> list[int]:
        """Return the token ids of a text, with the special tokens that the tokenizer adds."""
        return encode_text(self.tokenizer, text)

    def module(self) -> Any:
        """Return the Transformers module whose distribution the runtime reproduces.

        It is the module that the runtime runs, if torch computes all of it, or else a second copy loaded
        into memory.

        Raises:
            UnsupportedModelError: if the weights are quantised, which no module reproduces.
        """
        if (bits := self._quantised_bits) is not None:
            raise UnsupportedModelError(
                f"expected a model that a Transformers module computes, got {self.name} with weights in {bits} bits; "
                "load it without quantize, and a checkpoint that is stored quantised with runtime transformers"
            )
        model = self.runtime.module
        if model is None or any(isinstance(each, KernelLinear) for each in model.modules()):
            return self.checkpoint.read_module()
        return model


def encode_text(tokenizer: Any, text: str) -> list[int]:
    """Return the token ids of a text, with the special tokens that a tokenizer adds."""
    ids: list[int] = tokenizer(text, verbose=False).input_ids
    return ids
