"""Command line: one file per command; `main` turns every error into one line and an exit code.

Slow imports (torch, Transformers) are deferred to the commands, so `secondguess --help` is fast.
"""

from __future__ import annotations

import io
import os
import sys
import warnings
from _thread import interrupt_main
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import zip_longest
from threading import Timer
from typing import Annotated, Any

import typer

from secondguess import __version__
from secondguess.cli import bench, chat, export, generate, inspect, score, serve, train, tune, verify
from secondguess.cli.exit_codes import BAD_INPUT, BROKEN_PIPE, INTERNAL_ERROR, INTERRUPTED
from secondguess.cli.option_groups import with_groups
from secondguess.errors import MismatchWarning, SecondGuessError

CPU_ALLOCATOR = "DefaultCPUAllocator"

app = typer.Typer(
    name="secondguess",
    add_completion=False,
    no_args_is_help=True,
    context_settings={"help_option_names": ["-h", "--help"]},
)
COMMANDS = (
    generate.generate,
    chat.chat,
    serve.serve,
    score.score,
    verify.verify,
    inspect.inspect,
    bench.bench,
    tune.tune,
    export.export,
)
for _command in COMMANDS:
    app.command()(with_groups(_command))
app.add_typer(train.app, name="train")


def _show_version(wanted: bool) -> None:
    if wanted:
        print(f"secondguess {__version__}")
        raise typer.Exit


@app.callback()
def secondguess(
    version: Annotated[
        bool,
        typer.Option("--version", callback=_show_version, is_eager=True, help="Print the version and exit."),
    ] = False,
) -> None:
    """Lossless speculative decoding: faster generation, same output distribution.

    A drafter proposes tokens and the target model verifies them in one forward pass.
    """


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit code.

    Exit codes: 0 success; 1 a check failed (`verify`); 2 bad input; 70 a bug in this program;
    130 Ctrl-C; 141 the reader of the output closed the pipe. Errors are printed without a
    traceback; `SECONDGUESS_TRACEBACK=1` raises unexpected exceptions instead.
    """
    _replace_closed_streams()
    _escape_unencodable_output()
    try:
        with _own_hooks():
            code = _run(sys.argv[1:] if arguments is None else arguments)
        sys.stdout.flush()
        return code
    except BrokenPipeError:
        _redirect_stdout_to_devnull()
        return BROKEN_PIPE
    except KeyboardInterrupt as interruption:
        return _print_error(str(interruption) or "interrupted", INTERRUPTED)
    except SecondGuessError as error:
        return _print_error(f"error: {error}", BAD_INPUT)
    except OSError as error:
        return _print_error(f"error: {_os_error_message(error)}", BAD_INPUT)
    except Exception as error:
        if os.environ.get("SECONDGUESS_TRACEBACK"):
            raise
        if _is_out_of_memory(error):
            # torch prefixes the allocator's message with a location in its sources.
            words = str(error).rpartition(CPU_ALLOCATOR)[2].strip(" :") or "the machine has no more"
            return _print_error(
                f"error: out of memory: {words}; use a smaller model, dtype or batch", BAD_INPUT
            )
        if _was_interrupted(error):
            return _print_error("interrupted", INTERRUPTED)
        bug = f"internal error: {type(error).__name__}: {error} (SECONDGUESS_TRACEBACK=1 shows where)"
        return _print_error(bug, INTERNAL_ERROR)


@contextmanager
def _own_hooks() -> Iterator[None]:
    """Show this package's warnings in one line each, and lose no Ctrl-C."""
    before = sys.unraisablehook
    sys.unraisablehook = partial(_repeat_lost_interrupt, before)
    try:
        with warnings.catch_warnings():
            warnings.showwarning = partial(_show_warning, warnings.showwarning)
            yield
    finally:
        sys.unraisablehook = before


def _show_warning(
    otherwise: Callable[..., None],
    message: Warning | str,
    category: type[Warning],
    *details: Any,
    **more: Any,
) -> None:
    """Print a `MismatchWarning` as one line, and any other warning with `otherwise`."""
    if issubclass(category, MismatchWarning):
        _print_error(f"warning: {message}", 0)
    else:
        otherwise(message, category, *details, **more)


def _run(arguments: Sequence[str]) -> int:
    command = typer.main.get_command(app)
    try:
        with command.make_context("secondguess", list(arguments)) as context:
            # Commands return their exit code.
            return int(command.invoke(context) or 0)
    except typer.Exit as exit_request:
        return exit_request.exit_code
    except SystemExit as ended:
        if ended.code != 1:
            raise
        return BROKEN_PIPE  # rich, which writes the help, found a closed pipe
    except typer.TyperException as error:
        # Typer's message without its box. Without arguments, the message is the help text.
        if not arguments:
            print(error.format_message())
            return BAD_INPUT
        return _print_error(f"error: {error.format_message()}{_rejected_value(error, arguments)}", BAD_INPUT)


def _rejected_value(error: typer.TyperException, arguments: Sequence[str]) -> str:
    """Return the rejected option's value as ", got ...", which Typer's message leaves out."""
    if not isinstance(error, typer.BadParameter) or error.param is None:
        return ""
    for argument, following in zip_longest(arguments, arguments[1:]):
        name, equals, value = argument.partition("=")
        if name in error.param.opts and (equals or following is not None):
            return f", got {(value if equals else following)!r}"
    return ""


def _print_error(message: str, code: int) -> int:
    """Print one line of printable text to standard error and return the exit code."""
    line = " ".join(message.split())
    print("secondguess: " + "".join(c if c.isprintable() else repr(c)[1:-1] for c in line), file=sys.stderr)
    return code


def _os_error_message(error: OSError) -> str:
    """Return the message for an `OSError`, naming the file or folder but no errno."""
    if error.filename is None or error.strerror is None:
        return str(error)
    return f"expected a usable path, got {error.filename}: {error.strerror}; choose another one"


def _is_out_of_memory(error: Exception) -> bool:
    # Compared by name, to avoid importing torch; torch's CPU allocator has no exception class.
    is_torch_error = type(error).__name__ == "OutOfMemoryError" or CPU_ALLOCATOR in str(error)
    return isinstance(error, MemoryError) or is_torch_error


def _repeat_lost_interrupt(otherwise: Callable[[Any], Any], unraisable: Any) -> None:
    """Raise Ctrl-C again that came in a finalizer, where Python drops exceptions; handle others by `otherwise`."""
    if issubclass(unraisable.exc_type, KeyboardInterrupt):
        timer = Timer(0.01, interrupt_main)  # a moment later: raised here, it would be dropped again
        timer.daemon = True
        timer.start()
    else:
        otherwise(unraisable)


def _was_interrupted(error: BaseException | None) -> bool:
    """Return whether Ctrl-C caused an error, as in an import that C code was making."""
    if error is None or isinstance(error, KeyboardInterrupt):
        return error is not None
    return _was_interrupted(error.__cause__ or (None if error.__suppress_context__ else error.__context__))


def _replace_closed_streams() -> None:
    """Read nothing from standard input, and write nothing to outputs, that the caller has closed."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, mode))  # noqa: SIM115 - until the program ends


def _escape_unencodable_output() -> None:
    """Print escapes for characters that the terminal's encoding lacks, instead of failing."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")


def _redirect_stdout_to_devnull() -> None:
    """Redirect standard output to /dev/null.

    Otherwise Python reports a broken pipe when it flushes at exit.
    """
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
