"""The served model, as far as requests are checked and encoded with it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from secondguess.checkpoint.loaded import encode_text
from secondguess.checkpoint.plan import Checkpoint
from secondguess.checkpoint.source import Source
from secondguess.engine.models import Models, fits_memory
from secondguess.errors import BadInputError, CheckpointError
from secondguess.params import MIN_TEMPERATURE
from secondguess.sampling import SamplingParams
from secondguess.server.errors import ApiError

CHARACTERS_PER_TOKEN = 16
"""Several times the mean of any text. Texts with more for each token of the context are examined."""


@dataclass(frozen=True)
class ServedModel:
    """Tokenizer and sizes of a model, without its weights, which a sleeping engine releases."""

    name: str  # by which clients know it
    checkpoint: Checkpoint
    tokenizer: Any
    context_length: int  # tokens that a request may reach, as many as memory holds
    num_input_tokens: int  # number of token ids that a prompt may have
    takes_images: bool
    is_limited_by_memory: bool = False  # memory is the tighter limit

    @classmethod
    def from_llm(cls, llm: Models, name: str | None = None) -> ServedModel:
        """Return the target of models whose KV cache is empty, limited by the memory that is free now.

        A longer request would not fit either when all others have ended. Without `name`, clients know it by `short_name`.
        """
        target, runtime = llm.target, llm.target.runtime
        longest = runtime.context_length
        is_limited = bool(llm.cache_bytes) and not fits_memory(runtime, llm.cache_bytes, 1, longest)
        if is_limited:
            longest = 1 << (longest - 1).bit_length()  # caches grow by doubling
            while longest > 1 and not fits_memory(runtime, llm.cache_bytes, 1, longest):
                longest //= 2
        sizes = longest, runtime.num_input_tokens, runtime.takes_images
        return cls(name or short_name(target.name), target.checkpoint, target.tokenizer, *sizes, is_limited)

    @property
    def limit(self) -> str:
        """Words that precede the largest number of tokens in a message."""
        if self.is_limited_by_memory:
            return "the memory that was free when the server started holds"
        return "the model's context is"

    @property
    def max_characters(self) -> int:
        """Number of characters that fill the context several times in nearly every text."""
        return CHARACTERS_PER_TOKEN * self.context_length

    def check_characters(self, text: str) -> None:
        """Refuse a text whose first `max_characters` have too many tokens, wherever they end in the whole text.

        Not all of it is tokenized, which takes a hundred bytes per character.
        """
        if len(text) <= self.max_characters:
            return
        num_tokens = len(self.encode(text[: self.max_characters]))
        if num_tokens > 2 * self.context_length:
            first = f"of which the first {self.max_characters} have {num_tokens} tokens"
            raise self.too_long(f"{len(text)} characters, {first}")

    def too_long(self, got: str) -> ApiError:
        """Return the error of a prompt that leaves no position free."""
        message = (
            f"expected a prompt of at most {self.context_length - 1} tokens ({self.limit} {self.context_length} and one "
            f"position must stay free), got {got}; shorten it"
        )
        return ApiError(400, message, "prompt", "context_length_exceeded")

    def encode(self, text: str) -> list[int]:
        """Return the token ids of a text, as `LoadedModel.encode` does."""
        return encode_text(self.tokenizer, text)


def short_name(name: str) -> str:
    """Return the name of a model for clients: of a path, that of its folder or file.

    >>> short_name("Qwen/Qwen3-8B"), short_name("models/mine"), short_name("models/mine.Q4_K_M.gguf")
    ('Qwen/Qwen3-8B', 'mine', 'mine.Q4_K_M')
    """
    path = Path(name)
    if path.suffix == ".gguf":
        return path.stem
    return path.resolve().name if path.is_dir() else name


def recommended_sampling(source: Source | None) -> dict[str, float]:
    """Return the sampling settings in a checkpoint's `generation_config.json`, if they are in range.

    They are read as other servers do: a `top_k` of -1 means none, and a tiny temperature greedy decoding.
    """
    if source is None:
        return {}
    found = source.recommended_sampling
    temperature, top_k = found.get("temperature"), found.get("top_k")
    if isinstance(temperature, float) and 0 < temperature < MIN_TEMPERATURE:
        found["temperature"] = 0
    if top_k == -1:
        found["top_k"] = 0
    elif isinstance(top_k, float) and top_k.is_integer():
        found["top_k"] = int(top_k)
    try:
        SamplingParams(**found)
    except BadInputError as error:
        raise CheckpointError(
            f"{error}; correct generation_config.json in {source.path}, or serve with --no-generation-config"
        ) from error
    return found
