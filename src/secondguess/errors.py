"""The exception tree.

SecondGuessError                 everything this package raises on purpose
├── BadInputError (ValueError)   a value, option or prompt that cannot be used as given
├── CheckpointError              a model or tokenizer that is missing, broken or of the wrong kind
│   └── UnsupportedModelError    a model we read but cannot speculate on, refused by name
└── OutOfMemoryError             models and caches that do not fit, told before they are allocated

StrangerWarning (UserWarning) is no error: a drafter that was trained for other weights.

Every message says what was expected, what came and what to do about it; the command line prints it as one
line and exits with code 2.
"""


class SecondGuessError(Exception):
    """Base of every error that this package raises on purpose."""


class BadInputError(SecondGuessError, ValueError):
    """A value, an option or a prompt that cannot be used as given."""


class CheckpointError(SecondGuessError):
    """A model or a tokenizer that is missing, broken or of the wrong kind."""


class UnsupportedModelError(CheckpointError):
    """A model that was found but cannot be decoded speculatively; the message names the reason."""


class OutOfMemoryError(SecondGuessError):
    """Models and caches that would not fit; raised before anything large is allocated."""


class StrangerWarning(UserWarning):
    """A trained drafter is used with another target than it was trained for: right text, poor guesses."""
