"""Exit codes of the command line other than 0 (success)."""

CHECK_FAILED = 1
"""The certificate of `verify` failed or is inconclusive."""
BAD_INPUT = 2
INTERNAL_ERROR = 70
"""A bug in this program."""
INTERRUPTED = 130
BROKEN_PIPE = 141
"""The reader of standard output closed the pipe."""
