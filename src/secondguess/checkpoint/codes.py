"""Stand-in for the tokenizer of a model whose tokens have no text."""

from __future__ import annotations

from typing import Any

from secondguess.errors import BadInputError


class TokenCodes:
    """Tokenizer interface of a model of pixels (ImageGPT): its prompts and outputs are token ids.

    Args:
        name: name of the model, for messages.
        num_tokens: number of token ids; the last one begins a picture.
    """

    chat_template = None
    eos_token_id = None
    is_fast = False

    def __init__(self, name: str, num_tokens: int) -> None:
        self._name = name
        self._num_tokens = num_tokens

    def __len__(self) -> int:
        return self._num_tokens

    def __call__(self, text: str, **_: object) -> Any:
        raise BadInputError(
            f"expected token ids for {self._name}, whose tokens are pixels and have no text, got the text {text!r:.40}; "
            f"give a list of token ids, such as [{self._num_tokens - 1}] for a new picture"
        )

    def decode(self, token_ids: list[int], **_: object) -> str:
        """Return an empty text."""
        return ""

    def convert_ids_to_tokens(self, token: int) -> str:
        """Return an empty text."""
        return ""

    def get_vocab(self) -> dict[str, int]:
        """Return the token ids by their numbers: models with equally many of them share them."""
        return {str(token): token for token in range(self._num_tokens)}

    def get_added_vocab(self) -> dict[str, int]:
        """Return no tokens."""
        return {}
