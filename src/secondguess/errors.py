"""Exception hierarchy, and suggestions for misspelt names.

SecondGuessError                 base of all errors that this package raises on purpose
├── BadInputError (ValueError)   a value, option or prompt that cannot be used as given
├── CheckpointError              a model or tokenizer that is missing, broken or of the wrong kind
│   └── UnsupportedModelError    a model that was found but cannot be decoded speculatively
├── OutOfMemoryError             models and caches that do not fit; raised before allocation
└── NonFiniteLogitsError         a model whose logits are NaN or infinite

MismatchWarning (UserWarning)    a drafter that was trained for other target weights, or whose logits overflow

Every message gives what was expected, what was found and how to fix it. The command line prints it
as one line and exits with code 2.
"""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches


class SecondGuessError(Exception):
    """Base of every error that this package raises on purpose."""


class BadInputError(SecondGuessError, ValueError):
    """A value, an option or a prompt that cannot be used as given."""


class CheckpointError(SecondGuessError):
    """A model or a tokenizer that is missing, broken or of the wrong kind."""


class UnsupportedModelError(CheckpointError):
    """A model that was found but cannot be decoded speculatively; the message gives the reason."""


class OutOfMemoryError(SecondGuessError):
    """Models and caches that do not fit; raised before anything large is allocated."""


class NonFiniteLogitsError(SecondGuessError):
    """Logits that are NaN or infinite: weights that are broken, or activations that overflow."""


class MismatchWarning(UserWarning):
    """A drafter that was trained for another target, or whose logits overflow: correct text, but low acceptance."""


def suggestion(name: str, known: Iterable[str]) -> str:
    """Return the known name that a misspelt one resembles, as the end of a message; empty if there is none.

    >>> suggestion("ngrams", ["ngram", "suffix"])
    "; did you mean 'ngram'?"
    """
    nearest = get_close_matches(name, known, n=1)
    return f"; did you mean {nearest[0]!r}?" if nearest else ""
