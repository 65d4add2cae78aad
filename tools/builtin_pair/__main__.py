"""`python -m builtin_pair`: train the built-in pair, or install it or a head.

python -m builtin_pair run runs/pair --minutes 120 --corpus corpus --exclude-prompts FILE
python -m builtin_pair install runs/pair src/secondguess/builtin
python -m builtin_pair install-head heads/eagle src/secondguess/builtin/eagle
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

from builtin_pair.pair import PairRecipe, install_head, install_pair, train_pair
from secondguess.errors import SecondGuessError


def _report(line: str) -> None:
    print(time.strftime("%H:%M:%S"), line, flush=True)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m builtin_pair", description="Train a target and its draft model."
    )
    commands = parser.add_subparsers(dest="command", required=True)
    run = commands.add_parser("run", help="run or continue the whole recipe")
    run.add_argument("directory", type=Path)
    run.add_argument("--minutes", type=float, help="training time of both models together")
    run.add_argument(
        "--corpus", type=Path, action="append", default=[], help="a folder of installed packages; repeatable"
    )
    run.add_argument(
        "--exclude-prompts", type=Path, help="JSON lines of evaluation prompts to keep out of the text"
    )
    run.add_argument("--start", type=Path, help="the target folder of an earlier pair to continue")
    run.add_argument("--seed", type=int, default=0)
    for name in ("install", "install-head"):
        command = commands.add_parser(name)
        command.add_argument("directory", type=Path)
        command.add_argument("destination", type=Path)
    return parser.parse_args()


def _run(arguments: argparse.Namespace) -> None:
    recipe = PairRecipe(
        corpus=tuple(arguments.corpus),
        forbidden_prompts=arguments.exclude_prompts,
        start=arguments.start,
        seed=arguments.seed,
    )
    if arguments.minutes is not None:
        recipe = recipe.lasting(arguments.minutes)
    train_pair(recipe, arguments.directory, _report)


def main() -> int:
    arguments = _arguments()
    try:
        if arguments.command == "run":
            _run(arguments)
        elif arguments.command == "install":
            install_pair(arguments.directory, arguments.destination)
        else:
            install_head(arguments.directory, arguments.destination)
    except SecondGuessError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("interrupted; the same command continues from the last checkpoint", file=sys.stderr)
        return 130
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
