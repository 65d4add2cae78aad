"""What the program's exit code says, beside 0 for done."""

CHECK_FAILED = 1
"""`verify` found what should not be."""
BAD_INPUT = 2
INTERNAL_ERROR = 70
"""A bug in this program."""
INTERRUPTED = 130
BROKEN_PIPE = 141
"""The reader of the output went away."""
