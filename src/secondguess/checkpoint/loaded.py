"""Models that are loaded and ready for decoding."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from secondguess.checkpoint.plan import Checkpoint
from secondguess.runtime.cached import CachedRuntime
from secondguess.runtime.cpu.runtime import NativeRuntime
from secondguess.runtime.weight_format import QUANTIZATIONS


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
        if (bits := self.quantised_bits) is not None:
            parts.append(f"weights in {bits} bits")
        return ", ".join(parts)

    @property
    def quantised_bits(self) -> int | None:
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


def encode_text(tokenizer: Any, text: str) -> list[int]:
    """Return the token ids of a text, with the special tokens that a tokenizer adds."""
    ids: list[int] = tokenizer(text, verbose=False).input_ids
    return ids
