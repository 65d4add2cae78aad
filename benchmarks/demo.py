"""Race plain decoding against the default configuration on a target of a billion parameters.

    python benchmarks/demo.py "def read_lines(path):"

The target is the built-in one, grown to the cost of Llama 3.2 1B (growth.py): it computes the same, up to
rounding, at the speed of a model of that size. It is made when it is first needed, with a draft model, and kept.
"""

from __future__ import annotations

import shutil
import sys
import time
from pathlib import Path

from common import make_parser

from secondguess.api import LLM, load
from secondguess.builtin import builtin_paths
from secondguess.errors import BadInputError, SecondGuessError
from secondguess.runtime.system.quiet import no_progress_bars, quiet

with quiet():  # after that of secondguess.api, which imports Transformers without its warnings
    import make_pair
    from growth import GrownShape
    from transformers import AutoConfig

FOLDER = Path(__file__).parents[1] / "runs"
"""Folder of the grown pairs, which git ignores."""
WARM_UP_TOKENS = 24
GREEN, RESET = "\033[32m", "\033[0m"


def num_bytes(shape: GrownShape, vocab_size: int, head_dim: int) -> int:
    """Return the bytes of a grown model in bfloat16, without its norms."""
    attention = 2 * head_dim * (shape.num_attention_heads + shape.num_key_value_heads)
    layer = shape.hidden_size * (attention + 3 * shape.intermediate_size)
    return 2 * (shape.num_hidden_layers * layer + shape.hidden_size * vocab_size)


def grown_pair(shape: str, folder: Path) -> Path:
    """Return the directory of the grown built-in pair of a shape; make it if there is none.

    Raises:
        BadInputError: a folder that cannot be written, or without room.
    """
    out = folder / f"grown-{shape}"
    if out.is_dir():
        print(f"The pair of shape {shape} is in {out}.")
        return out
    config = AutoConfig.from_pretrained(builtin_paths().target)
    needed = sum(
        num_bytes(each, config.vocab_size, config.head_dim) for each in make_pair.GROWN_SHAPES[shape]
    )
    try:
        folder.mkdir(parents=True, exist_ok=True)
        free = shutil.disk_usage(folder).free
        if needed > free:
            raise BadInputError(
                f"expected {needed / 1e9:.2f} GB of free disk space in {folder}, got {free / 1e9:.2f} GB; "
                "free some, or give another folder with --folder"
            )
        print(
            f"Making a pair of shape {shape} in {out}, {needed / 1e9:.2f} GB: about half a minute, once. "
            "It is kept there for the next time; delete it whenever you like.",
            flush=True,
        )
        unfinished = out.with_name(f"{out.name}.unfinished")
        shutil.rmtree(unfinished, ignore_errors=True)
        with no_progress_bars():
            make_pair.grow_pair(unfinished, None, shape)
        unfinished.rename(out)
    except OSError as error:
        raise BadInputError(
            f"expected a folder that can be written, got {folder}: {error}; give another one with --folder"
        ) from None
    return out


def race(llm: LLM, prompt: str, num_tokens: int) -> dict[str, float]:
    """Write the continuation of a prompt without and with drafts as it comes; return the tokens/s.

    Raises:
        SecondGuessError: the texts differ.
    """
    speeds, texts = {}, []
    for name, draft_length in (("plain decoding", 0), ("speculative decoding", None)):
        llm.generate(prompt, max_tokens=WARM_UP_TOKENS, draft_length=draft_length)
        print(f"\n{name}:\n\n{prompt}", end="", flush=True)
        start, tokens = time.perf_counter(), []
        for piece in llm.stream(prompt, max_tokens=num_tokens, draft_length=draft_length):
            tokens += piece.tokens
            for text, drafted in piece.segments:
                print(f"{GREEN}{text}{RESET}" if drafted else text, end="", flush=True)
        speeds[name] = len(tokens) / (time.perf_counter() - start)
        texts.append(tokens)
        print(f"\n\n{len(tokens)} tokens, {speeds[name]:.1f} tokens/s")
    if texts[0] != texts[1]:
        raise SecondGuessError("expected the same text with and without drafts, got different ones")
    return speeds


def main(arguments: list[str] | None = None) -> int:
    parser = make_parser(__doc__, output=False)
    parser.add_argument("prompt", nargs="?", default="def read_lines(path):")
    parser.add_argument("--tokens", type=int, default=96)
    parser.add_argument("--shape", choices=sorted(make_pair.GROWN_SHAPES), default="llama-3.2-1b")
    parser.add_argument("--folder", type=Path, default=FOLDER, help="where the pair is kept")
    options = parser.parse_args(arguments)
    try:
        pair = grown_pair(options.shape, options.folder)
        llm = load(pair / "target")
        print(f"Drafts come from the default drafter of this target, {llm.drafter.name}.")
        plain, speculative = race(llm, options.prompt, options.tokens).values()
    except SecondGuessError as error:
        print(f"demo: error: {error}", file=sys.stderr)
        return 2
    print(
        f"\nThe same text, {speculative / plain:.2f} times as fast: {plain:.1f} and {speculative:.1f} tokens/s. Green "
        "tokens were drafted; the target verified every one of them."
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
