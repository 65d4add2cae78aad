"""The command line in a process of its own: with signals, terminals and an exit code.

The process is forked from this one, as a new interpreter would import torch and Transformers for several seconds.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import warnings
from collections.abc import Sequence
from multiprocessing.process import BaseProcess

import torch


def start_command(arguments: Sequence[object], streams: Sequence[int | None] = ()) -> BaseProcess:
    """Start `secondguess ARGUMENTS`.

    Args:
        arguments: words after the program's name.
        streams: file descriptors of standard input, output and error; None, or nothing, for those of this process.
    """
    words = [str(argument) for argument in arguments]
    process = multiprocessing.get_context("fork").Process(target=_run, args=(words, streams), daemon=True)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # Python 3.12 warns of forks beside threads
        process.start()
    return process


def _run(arguments: list[str], streams: Sequence[int | None]) -> None:
    from secondguess.cli import main

    torch.set_num_threads(1)  # the other threads of a pool do not survive a fork, and would be waited for
    for number, given in enumerate(streams):
        if given is not None:
            os.dup2(given, number)
    sys.stdin, sys.stdout, sys.stderr = open(0), open(1, "w"), open(2, "w", buffering=1)  # noqa: SIM115
    signal.signal(signal.SIGINT, signal.default_int_handler)
    warnings.resetwarnings()
    sys.exit(main(arguments))
