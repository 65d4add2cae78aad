"""Is the text the same with and without speculation? Counts differences over a prompt set and explains each one.

    python benchmarks/equality.py --prompts ../shared/data/humaneval.jsonl --dtype float32

Every drafter and batch size is compared with plain decoding (drafter `none`, batch 1), greedy and with a seed. A text that
differs is a *flip*: for each, the gap that decided it is measured (greedy: between the two best logits; seeded: between the
two best arrivals of the race, in log units), so that a near-tie can be told from a mistake.
"""

import argparse
import json
import time
from pathlib import Path

import torch

from secondguess import SamplingParams
from secondguess.api import LLM, load
from secondguess.bench.provenance import gather
from secondguess.core import Draft, Row
from secondguess.noise import KeyedNoise
from secondguess.runtime.base import Runtime
from secondguess.runtime.loading import find_checkpoint
from secondguess.sampling import target_laws

DRAFTERS = ("none", "model:builtin-draft", "ngram", "suffix")
SEED = 7


def texts(llm: LLM, prompts: list[str], params: SamplingParams, batch_size: int) -> list[list[int]]:
    """Output tokens of every prompt."""
    tokens: list[list[int]] = []
    for start in range(0, len(prompts), batch_size):
        batch = prompts[start : start + batch_size]
        tokens += [output.token_ids for output in llm.generate_batch(batch, [params] * len(batch))]
    return tokens


def deciding_gap(runtime: Runtime, context: list[int], params: SamplingParams) -> float:
    """How close the two best tokens were behind this context: the smaller, the nearer a tie."""
    row = Row(context, params, seed=params.seed or 0, coupled=params.seed is not None)
    runtime.begin([row])
    empty = Draft.empty(1, runtime.device)
    logits = runtime.score([row], empty).logits
    runtime.end(row)
    if params.temperature == 0:
        scores = logits[0, 0]
    else:
        laws = target_laws(logits, [row], empty)
        depths = torch.zeros(1, 1, dtype=torch.long, device=runtime.device)
        scores = -KeyedNoise.of_rows([row], runtime.device).arrivals(laws, depths).log()[0, 0]
    best = scores.topk(2).values
    return float(best[0] - best[1])


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--prompts", type=Path, required=True, help="one JSON object with a `prompt` per line"
    )
    parser.add_argument("--model", default="builtin")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--max-tokens", type=int, default=64)
    parser.add_argument("--num-prompts", type=int, default=None)
    parser.add_argument("--batch-sizes", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--output", type=Path, default=None, help="where to store the counts as JSON")
    options = parser.parse_args()
    lines = options.prompts.read_text().splitlines()[: options.num_prompts]
    prompts = [json.loads(line)["prompt"] for line in lines]

    results = []
    for label, params in {
        "greedy": SamplingParams(max_tokens=options.max_tokens),
        f"seed {SEED}, temperature 1": SamplingParams(
            max_tokens=options.max_tokens, temperature=1.0, seed=SEED
        ),
    }.items():
        plain: list[list[int]] | None = None
        for drafter in DRAFTERS:
            llm = load(options.model, drafter, dtype=options.dtype)
            for batch_size in options.batch_sizes:
                start = time.perf_counter()
                tokens = texts(llm, prompts, params, batch_size)
                plain = plain or tokens
                flips = []
                for prompt, ours, theirs in zip(prompts, tokens, plain, strict=True):
                    if ours != theirs:
                        pairs = zip(ours, theirs, strict=False)
                        same = next(i for i, (a, b) in enumerate(pairs) if a != b)
                        context = llm.target.encode(prompt) + theirs[:same]
                        gap = deciding_gap(llm.target.runtime, context, params)
                        flips.append({"position": same, "gap": gap})
                result = {
                    "mode": label,
                    "drafter": drafter,
                    "batch_size": batch_size,
                    "num_texts": len(prompts),
                    "num_tokens": sum(map(len, tokens)),
                    "flips": flips,
                    "seconds": round(time.perf_counter() - start, 1),
                }
                results.append(result)
                print(json.dumps(result), flush=True)
    total = sum(len(result["flips"]) for result in results)
    print(f"{total} texts differ in {len(results)} comparisons of {len(prompts)} prompts ({options.dtype})")
    if options.output:
        provenance = gather(
            num_threads=torch.get_num_threads(),
            device=llm.target.device,
            dtype=llm.target.dtype,
            seed=SEED,
            models={name: Path(find_checkpoint(name)) for name in (options.model, "builtin-draft")},
            runtimes={options.model: llm.target.kind},
        )
        report = {"provenance": provenance.as_dict(), "results": results}
        options.output.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
