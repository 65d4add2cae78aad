"""Measure how long a prompt that joins stalls rows that decode, and how much of it a shared prefix saves.

    python benchmarks/prefill_stall.py --output prefill-stall.json

Two rows decode; a prompt of `--prompt-tokens` tokens joins. Between two rounds it may be prefilled
for as long as `MAX_DELAY` rounds (`engine/prefill_budget.py`); the times of the steps show whether
it was. Then a short prompt arrives while the long one is prefilled alone. Then a second prompt that shares `--share` of the
first one's tokens is decoded, and again without the cache of the first. Every text is compared with that of a run alone.
Models whose context is shorter than `--context` are loaded with a changed configuration: their texts are of no use beyond
their own context, but take as long. Exits with code 1 if a text differs, or if more tokens than the unshared ones are
prefilled.
"""

from __future__ import annotations

import json
import sys
import tempfile
import time
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from statistics import median, quantiles
from typing import Any

import torch
from common import make_parser, store

from secondguess import SamplingParams
from secondguess.api import LLM, Generation, load
from secondguess.builtin import head_path
from secondguess.checkpoint.resolve import find_checkpoint
from secondguess.drafters.feature_drafter import FeatureDrafter
from secondguess.drafters.mirroring import TokenDrafter
from secondguess.engine.prefill_budget import MAX_DELAY
from secondguess.runtime.base import Runtime

SEED = 7
WARM_UP, BASELINE = 50, 100
"""Steps of the decoding rows before the prompt joins: not recorded, and recorded."""
NUM_TOKENS = 32
"""Generated tokens of the long prompts."""
DRAFT_LENGTH = 3
"""Draft length of all rounds, so that every drafter has to prefill."""


def with_context(name: str, context: int, folder: Path) -> str:
    """Return a directory with the files of a model, and this context length in its configuration."""
    found = Path(find_checkpoint(name)).resolve()
    for file in found.iterdir():
        if file.name != "config.json":
            (folder / file.name).symlink_to(file)
    config = json.loads((found / "config.json").read_text()) | {"max_position_embeddings": context}
    (folder / "config.json").write_text(json.dumps(config))
    return str(folder)


def text_alone(llm: LLM, prompt: list[int], num_tokens: int) -> list[int]:
    """Return the tokens that follow a prompt, decoded alone and with an empty cache."""
    llm.reset_prefix_cache()
    (output,) = Generation(llm, [prompt], [params_of(num_tokens)]).run()
    return output.token_ids


def params_of(num_tokens: int) -> SamplingParams:
    return SamplingParams(temperature=1.0, seed=SEED, max_tokens=num_tokens, min_tokens=num_tokens)


def random_prompt(num_tokens: int, vocab_size: int, seed: int) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(vocab_size, (num_tokens,), generator=generator).tolist()


def measure_stall(llm: LLM, prompts: Sequence[list[int]], late: list[int]) -> dict[str, Any]:
    """Return the times of the steps of decoding rows while a long prompt is prefilled."""
    runtime, shared = llm.target.runtime, llm.shared_batch

    def step() -> float:
        start = time.perf_counter()
        shared.step()
        return (time.perf_counter() - start) * 1e3

    def submit(prompts: Sequence[list[int]], num_tokens: int) -> Generation:
        made = Generation(llm, prompts, [params_of(num_tokens)] * len(prompts))
        made.group.is_eager = True
        shared.submit(made.group)
        return made

    llm.reset_prefix_cache()
    start = time.perf_counter()
    expected_late = text_alone(llm, late, NUM_TOKENS)
    whole = (time.perf_counter() - start) * 1e3
    llm.reset_prefix_cache()
    decoding = submit(prompts, runtime.context_length - 2 * max(map(len, prompts)))
    for _ in range(WARM_UP):
        step()
    alone = [step() for _ in range(BASELINE)]
    joining = submit([late], NUM_TOKENS)
    (row,) = joining.group.rows
    during, after, num_prefilled = [], [], []
    while not row.num_output:
        before = runtime.num_prefilled
        during.append(step())
        num_prefilled.append(runtime.num_prefilled - before)
    while not row.finished:
        after.append(step())
    shared.cancel(decoding.group)
    texts = [row.output for row in decoding.group.rows]
    same = [text_alone(llm, prompt, len(text)) == text for prompt, text in zip(prompts, texts, strict=True)]
    round_ms = median(alone)
    return {
        "round_ms": round(round_ms, 2),
        "round_p99_ms": round(quantiles(alone, n=100)[-1], 2),
        "step_beside_prefill_ms": round(median(during), 2),
        "step_beside_prefill_p99_ms": round(quantiles(during, n=100)[-1], 2),
        "largest_step_beside_prefill_ms": round(max(during), 2),
        "first_steps_after_prefill_ms": [round(each, 2) for each in after[:2]],
        "steps_in_rounds": round(median(during) / round_ms, 2),
        "steps_beyond_budget": sum(each > (1 + MAX_DELAY) * round_ms for each in during),
        "num_steps": len(during),
        "prefilled_per_step": [min(num_prefilled), int(median(num_prefilled)), max(num_prefilled)],
        "text_alone_ms": round(whole, 1),
        "time_to_first_token_ms": round(sum(during), 1),
        "texts_equal": all(same) and row.output == expected_late,
    }


def measure_arrival(llm: LLM, late: list[int], short: list[int]) -> dict[str, Any]:
    """Return when a short prompt has its first token, and the times between its tokens, while a long one is prefilled.

    The short prompt arrives at the beginning of a prefill for which no row waits. Times are in rounds of the short
    prompt alone.
    """
    shared = llm.shared_batch

    def run(prompts: Sequence[list[int]]) -> tuple[float, list[float]]:
        llm.reset_prefix_cache()
        generations = [Generation(llm, [prompt], [params_of(2 * NUM_TOKENS)]) for prompt in prompts]
        for generation in generations:
            generation.group.is_eager = True
        *long, arriving = [generation.group for generation in generations]
        for group in long:
            shared.submit(group)
            shared.step()
        start = time.perf_counter()
        for _ in long:
            shared.step()
        shared.submit(arriving)
        (row,), ends = arriving.rows, []
        while not row.finished:
            shared.step()
            if row.num_output > len(ends):
                ends += [time.perf_counter()] * (row.num_output - len(ends))
        for group in long:
            shared.cancel(group)
        return ends[0] - start, [after - before for before, after in pairwise(ends)]

    _, alone = run([short])
    round_seconds = median(alone)
    first, between = run([late, short])
    return {
        "round_ms": round(round_seconds * 1e3, 2),
        "first_token_in_rounds": round(first / round_seconds, 2),
        "tokens_in_rounds": round(median(between) / round_seconds, 2),
        "tokens_in_rounds_p99": round(quantiles(between, n=100)[-1] / round_seconds, 2),
    }


def measure_shared_prefix(llm: LLM, first: list[int], second: list[int]) -> dict[str, Any]:
    """Return the prefilled tokens and the time of a prompt after another one that begins alike."""
    runtimes: dict[str, Runtime] = {"target": llm.target.runtime}
    if isinstance(llm.drafter, TokenDrafter | FeatureDrafter):
        runtimes["drafter"] = llm.drafter.runtime
    results: dict[str, Any] = {}
    texts = []
    for name, prompts in {"fresh": [second], "after_the_first": [first, second]}.items():
        llm.reset_prefix_cache()
        for prompt in prompts:
            before = {part: runtime.num_prefilled for part, runtime in runtimes.items()}
            start = time.perf_counter()
            output = llm.generate(prompt, params_of(NUM_TOKENS))
            seconds = time.perf_counter() - start
        counts = {part: runtime.num_prefilled - before[part] for part, runtime in runtimes.items()}
        results[name] = {"prefilled": counts, "ms": round(seconds * 1e3, 1)}
        texts.append(output.token_ids)
    return {**results, "texts_equal": texts[0] == texts[1]}


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--model", default="builtin", help="builtin (default) or a directory")
    parser.add_argument(
        "--draft-model", default="builtin-draft", help="builtin-draft (default) or a directory"
    )
    parser.add_argument("--head", default=head_path("eagle"), type=Path, help="folder of an EAGLE head")
    parser.add_argument("--drafters", nargs="+", default=["none", "model", "eagle"])
    parser.add_argument("--dtypes", nargs="+", default=["auto", "float32"])
    parser.add_argument("--prompt-tokens", type=int, default=4000)
    parser.add_argument("--share", type=float, default=0.9)
    parser.add_argument("--context", type=int, default=8192)
    parser.add_argument("--threads", type=int, default=2)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)

    results, correct = [], True
    with tempfile.TemporaryDirectory() as target, tempfile.TemporaryDirectory() as draft:
        model = with_context(options.model, options.context, Path(target))
        draft_model = with_context(options.draft_model, options.context, Path(draft))
        drafters = {"none": "none", "model": f"model:{draft_model}", "eagle": f"eagle:{options.head}"}
        for dtype in options.dtypes:
            for name in options.drafters:
                drafter = drafters[name]
                controller = None if name == "none" else f"fixed:{DRAFT_LENGTH}"
                llm = load(model, drafter, dtype=dtype, controller=controller)
                vocab_size = llm.target.runtime.vocab_size
                early = [random_prompt(40, vocab_size, seed) for seed in (1, 2)]
                late = random_prompt(options.prompt_tokens, vocab_size, 3)
                num_shared = int(options.share * len(late))
                second = late[:num_shared] + random_prompt(len(late) - num_shared, vocab_size, 4)
                result = {
                    "drafter": name,
                    "dtype": llm.target.dtype,
                    "runtime": llm.target.runtime_description,
                    "stall": measure_stall(llm, early, late),
                    "arrival": measure_arrival(llm, late, early[0][:30]),
                    "shared_prefix": measure_shared_prefix(llm, late, second),
                }
                results.append(result)
                print(json.dumps(result), flush=True)
                counts = result["shared_prefix"]["after_the_first"]["prefilled"]
                correct &= max(counts.values()) <= len(late) - num_shared
                correct &= result["stall"]["texts_equal"] and result["shared_prefix"]["texts_equal"]
    settings = {
        "prompt_tokens": options.prompt_tokens,
        "share": options.share,
        "context": options.context,
        "max_delay_in_rounds": MAX_DELAY,
        "draft_length": DRAFT_LENGTH,
    }
    store(
        options,
        {"settings": settings, "results": results},
        num_threads=options.threads,
        device=llm.target.device,
        dtype=", ".join(options.dtypes),
        seed=SEED,
        models={
            Path(name).name: Path(find_checkpoint(name)) for name in (options.model, options.draft_model)
        },
        runtimes={Path(options.model).name: ", ".join({each["runtime"] for each in results})},
    )
    sys.exit(not correct)


if __name__ == "__main__":
    main()
