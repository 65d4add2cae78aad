"""Count texts that differ with and without speculation over a prompt set, and explain each one.

    python benchmarks/equality.py --prompts humaneval.jsonl --dtype float32
    python benchmarks/equality.py --prompts words:64 --model PAIR/target --draft-model PAIR/drafter

Every drafting mode and batch size is compared with plain decoding (no drafter, the first of
`--batch-sizes`), greedy and with a seed: chains of the given lengths, trees in which every node
has a wrong sibling, and n-gram and suffix lookup. A text that differs is a *flip*. For each
flip the gap between the two best tokens is measured (greedy: of their logits; seeded: of their
log arrival times in the exponential race), which distinguishes a near-tie from an error.
"""

import argparse
import json
import time
from collections.abc import Sequence
from pathlib import Path

import torch
from common import make_parser, store

from secondguess import SamplingParams
from secondguess.api import LLM, Generation, load
from secondguess.checkpoint.resolve import find_checkpoint
from secondguess.core import Budgets, Draft, Row, Verdict
from secondguess.drafters.base import Drafter
from secondguess.runtime.base import HiddenStates, Runtime
from secondguess.sampling.noise import KeyedNoise, Noise
from secondguess.sampling.probs import compute_target_probs

SEED = 7


class TreeDrafter(Drafter):
    """Drafter that turns another drafter's chains into trees.

    A wrong sibling precedes each node, so every accepted path has to be moved in the KV cache.
    """

    name = "tree"
    deterministic = True

    def __init__(self, inner: Drafter, vocab_size: int) -> None:
        self._inner = inner
        self._vocab_size = vocab_size

    def begin(self, rows: Sequence[Row], hidden: Sequence[HiddenStates] = ()) -> None:
        self._inner.begin(rows, hidden)

    def propose(self, rows: Sequence[Row], budgets: Budgets, noise: Noise) -> Draft:
        chain = self._inner.propose(rows, budgets, noise)
        wrong = (chain.tokens + 1).remainder(self._vocab_size)
        tokens = torch.stack((wrong, chain.tokens), -1).flatten(1)
        parents = (2 * torch.arange(chain.num_nodes) - 1).repeat_interleave(2).expand_as(tokens)
        real = torch.arange(tokens.shape[1]) < 2 * chain.lengths[:, None]
        return Draft(tokens, torch.where(real, parents, -1), 2 * chain.lengths)

    def observe(self, rows: Sequence[Row], verdict: Verdict, hidden: HiddenStates) -> None:
        self._inner.observe(rows, verdict, hidden)

    def release(self, row: Row) -> None:
        self._inner.release(row)


def load_way(way: str, options: argparse.Namespace) -> LLM:
    """Load the target with a drafting mode: `plain`, `chain K`, `tree`, or a drafter's name."""
    kind, _, length = way.partition(" ")
    model = f"model:{options.draft_model}"
    if kind in ("chain", "tree"):
        llm = load(options.model, model, dtype=options.dtype, controller=f"fixed:{length or 4}")
    else:
        llm = load(options.model, "none" if kind == "plain" else way, dtype=options.dtype)
    if kind == "tree":
        drafter = TreeDrafter(llm.drafter, llm.target.runtime.vocab_size)
        return LLM(llm.target, drafter, llm.verifier, llm.controller, llm.cache_bytes)
    return llm


def read_prompts(source: str, count: int | None) -> list[str]:
    """Read prompts from a file, or make N random texts for the calibrated pair (`words:N`)."""
    kind, _, number = source.partition(":")
    if kind == "words":
        generator = torch.Generator().manual_seed(SEED)
        tokens = torch.randint(4096, (int(number), 14), generator=generator).tolist()
        return [" ".join(f"t{token}" for token in text) for text in tokens]
    return [json.loads(line)["prompt"] for line in Path(source).read_text().splitlines()[:count]]


def texts(llm: LLM, prompts: list[str], params: SamplingParams, batch_size: int) -> list[list[int]]:
    """Return the output tokens of every prompt."""
    tokens: list[list[int]] = []
    for start in range(0, len(prompts), batch_size):
        batch = prompts[start : start + batch_size]
        tokens += [output.token_ids for output in Generation(llm, batch, [params] * len(batch)).run()]
    return tokens


def deciding_gap(runtime: Runtime, context: list[int], params: SamplingParams) -> float:
    """Return the gap between the two best tokens after a context; 0 is a tie."""
    row = Row(context, params, seed=params.seed or 0, coupled=params.seed is not None)
    runtime.begin([row])
    empty = Draft.empty(1, runtime.device)
    logits = runtime.score([row], empty).logits
    runtime.release(row)
    if params.temperature == 0:
        scores = logits[0, 0]
    else:
        dists = compute_target_probs(logits, [row], empty)
        depths = torch.zeros(1, 1, dtype=torch.long, device=runtime.device)
        scores = -KeyedNoise.from_rows([row], runtime.device).arrival_times(dists, depths).log()[0, 0]
    best = scores.topk(2).values
    return float(best[0] - best[1])


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument(
        "--prompts", required=True, help="file with one JSON object with a `prompt` per line, or words:N"
    )
    parser.add_argument("--model", default="builtin")
    parser.add_argument("--draft-model", default="builtin-draft")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument(
        "--ways",
        nargs="+",
        default=[*(f"chain {length}" for length in range(1, 9)), "tree", "ngram", "suffix"],
        help="compared with plain decoding",
    )
    parser.add_argument("--max-tokens", type=int, default=64)
    parser.add_argument("--num-prompts", type=int, default=None)
    parser.add_argument("--batch-sizes", type=int, nargs="+", default=[1, 4])
    options = parser.parse_args()
    prompts = read_prompts(options.prompts, options.num_prompts)

    results = []
    for label, params in {
        "greedy": SamplingParams(max_tokens=options.max_tokens),
        f"seed {SEED}, temperature 1": SamplingParams(
            max_tokens=options.max_tokens, temperature=1.0, seed=SEED
        ),
    }.items():
        plain: list[list[int]] | None = None
        for way in ("plain", *options.ways):
            llm = load_way(way, options)
            for batch_size in options.batch_sizes:
                start = time.perf_counter()
                tokens = texts(llm, prompts, params, batch_size)
                plain = plain or tokens
                flips = []
                for prompt, ours, theirs in zip(prompts, tokens, plain, strict=True):
                    if ours != theirs:
                        pairs = zip(ours, theirs, strict=False)
                        same = next(
                            (i for i, (a, b) in enumerate(pairs) if a != b), min(len(ours), len(theirs))
                        )
                        context = llm.target.encode(prompt) + theirs[:same]
                        gap = deciding_gap(llm.target.runtime, context, params)
                        flips.append({"position": same, "gap": gap})
                result = {
                    "mode": label,
                    "way": way,
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
    models = {Path(name).name: Path(find_checkpoint(name)) for name in (options.model, options.draft_model)}
    store(
        options,
        {"results": results},
        num_threads=torch.get_num_threads(),
        device=llm.target.device,
        dtype=llm.target.dtype,
        seed=SEED,
        models=models,
        runtimes={Path(options.model).name: llm.target.runtime_description},
    )


if __name__ == "__main__":
    main()
