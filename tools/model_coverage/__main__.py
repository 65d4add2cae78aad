"""``python -m model_coverage --output docs/models.md``: compare every class and write the table.

Each class is built, saved and compared in a process of its own with a time limit.
"""

from __future__ import annotations

import argparse
import multiprocessing
import sys
import tempfile
import traceback
from multiprocessing.connection import Connection
from pathlib import Path

import torch
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from model_coverage.compare import find_differences, load_tiny, read_references
from model_coverage.report import Result, read_report, write_report
from model_coverage.tiny import GAINS, write_tiny
from secondguess.errors import SecondGuessError, UnsupportedModelError
from secondguess.runtime.system.quiet import quiet

SECONDS = 180
MAX_REASON = 250
"""Characters of an error of other libraries."""
MIN_DIFFERENT_TOKENS = 6
"""Fewest different tokens in the expected texts for a comparison that shows something."""


def compare_class(model_type: str) -> Result:
    """Build a tiny checkpoint of a model type and compare it with Transformers alone."""
    with tempfile.TemporaryDirectory() as folder:
        directory = Path(folder)
        for seed in range(len(GAINS)):
            try:
                write_tiny(model_type, directory, seed)
            except Exception as error:
                return _refused_by_configuration(model_type, directory) or Result(
                    model_type, "not built", reason=_describe(error)
                )
            try:
                llm = load_tiny(directory)
            except SecondGuessError as error:
                return Result(model_type, "refused", reason=str(error).replace(folder, model_type))
            except Exception as error:
                traceback.print_exc()
                return Result(model_type, "crash", reason=_describe(error))
            try:
                references = read_references(directory)
            except Exception as error:
                return Result(model_type, "not built", reason=f"Transformers alone: {_describe(error)}")
            if len({token for each in references for token in each.output}) >= MIN_DIFFERENT_TOKENS:
                break
        else:
            return Result(
                model_type, "not built", reason="its random weights repeat few tokens with every seed"
            )
        try:
            differences = find_differences(llm, references)
        except Exception as error:
            traceback.print_exc()
            return Result(model_type, "crash", llm.target.runtime_description, _describe(error))
    return Result(
        model_type,
        "differs" if differences else "same",
        llm.target.runtime_description,
        ", ".join(differences),
    )


def _refused_by_configuration(model_type: str, directory: Path) -> Result | None:
    """Return the refusal of a model that cannot be built, if its configuration is enough for it."""
    try:
        load_tiny(directory)
    except UnsupportedModelError as error:
        return Result(model_type, "refused", reason=str(error).replace(str(directory), model_type))
    except Exception:
        return None
    return None


def _describe(error: Exception) -> str:
    return " ".join(f"{type(error).__name__}: {error}".split())[:MAX_REASON]


def compare_in_process(model_type: str) -> Result:
    """Compare a class in a process of its own, which is killed when its time is over."""
    context = multiprocessing.get_context("fork")
    ours, theirs = context.Pipe(duplex=False)
    process = context.Process(target=_send_result, args=(model_type, theirs))
    process.start()
    theirs.close()
    try:
        if not ours.poll(SECONDS):
            return Result(model_type, "crash", reason=f"no result after {SECONDS} s")
        result: Result = ours.recv()
        return result
    except EOFError:
        return Result(model_type, "crash", reason="the process ended without a result")
    finally:
        process.kill()
        process.join()


def _send_result(model_type: str, connection: Connection) -> None:
    with quiet():
        connection.send(compare_class(model_type))


def main() -> int:
    """Compare the classes and write the table; return 1 if a class crashed or differs."""
    parser = argparse.ArgumentParser(prog="python -m model_coverage", description=__doc__)
    parser.add_argument("models", nargs="*", help="model types; all of the mapping by default")
    parser.add_argument("--output", type=Path, help="table to write, whose other lines are kept")
    options = parser.parse_args()
    torch.set_num_threads(1)
    before = read_report(options.output) if options.models and options.output else []
    results = {result.model_type: result for result in before}
    for model_type in options.models or MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        results[model_type] = compare_in_process(model_type)
        print(results[model_type].line, flush=True)
    if options.output is not None:
        write_report(list(results.values()), options.output)
    return int(any(result.outcome in ("crash", "differs") for result in results.values()))


if __name__ == "__main__":
    sys.exit(main())
