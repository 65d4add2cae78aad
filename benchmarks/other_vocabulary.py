"""Measure a draft model with another tokenizer than the target's, compared with the same model with the target's.

    python benchmarks/other_vocabulary.py --output other.json
    python benchmarks/other_vocabulary.py --model pairs/grown-88m/target --draft pairs/grown-88m/drafter --transformers

No draft model was trained with another tokenizer for these targets. The stand-in has the weights of
the draft model: its tokenizer lacks the last merges, and the remaining tokens, with their rows of the
embeddings, are in another order. It was not trained to write the removed tokens in pieces, so it drafts
worse than a model trained with its tokenizer would.

Our systems decode in turns, one round each; `--transformers` runs whole texts, with prefill. `tau` is the
number of tokens per target pass; `translation` the share of following the text, encoding and restricting
drafts in all of a system's time. `follow` is the time to follow a commit of 4 tokens at the end of texts of two lengths.
"""

from __future__ import annotations

import argparse
import json
import shutil
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import Any

import torch
from common import make_parser, store
from in_turns import ModelsWithOwnCaches, in_turns
from safetensors.torch import load_file, save_file
from transformers import AutoTokenizer, GenerationConfig

from secondguess.bench.peers import TransformersModel
from secondguess.bench.systems import Models, SecondguessSystem
from secondguess.checkpoint.resolve import find_checkpoint
from secondguess.drafters.vocabulary.drafters import IntersectionDrafter, StringDrafter, TranslatingDrafter
from secondguess.drafters.vocabulary.pair import VocabularyPair
from secondguess.drafters.vocabulary.view import DraftView
from secondguess.runtime.quiet import quiet
from secondguess.workloads.loading import load_workload
from secondguess.workloads.provenance import public_name

TIMED = [(TranslatingDrafter, "_follow"), (IntersectionDrafter, "_restrict"), (StringDrafter, "_encoded")]


def write_other_model(source: Path, folder: Path, keep: float, unused: tuple[str, ...] = ()) -> None:
    """Write a draft model with a part of the merges, and with its tokens in another order.

    Args:
        source, folder: of the draft model as it is, and as it is written.
        keep: share of the merges.
        unused: tokens to add, whose embeddings are zeros.
    """
    shutil.copytree(source, folder)
    tokenizer = json.loads((source / "tokenizer.json").read_text())
    model = tokenizer["model"]
    merges = model["merges"][: round(keep * len(model["merges"]))]
    made = {"".join(pair if isinstance(pair, list) else pair.split(" ")) for pair in merges}
    removed = {
        "".join(pair if isinstance(pair, list) else pair.split(" ")) for pair in model["merges"]
    } - made
    kept = [token for token in sorted(model["vocab"], key=model["vocab"].__getitem__) if token not in removed]
    order = torch.randperm(len(kept), generator=torch.Generator().manual_seed(1)).tolist()
    tokens = [kept[place] for place in order]
    rows = torch.tensor([model["vocab"][token] for token in tokens])
    tokens += unused
    model["vocab"], model["merges"] = {token: index for index, token in enumerate(tokens)}, merges
    for added in tokenizer["added_tokens"]:
        added["id"] = model["vocab"][added["content"]]
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    weights = load_file(source / "model.safetensors")
    size = json.loads((source / "config.json").read_text())["vocab_size"]
    weights = {
        name: torch.cat([each[rows], each.new_zeros(len(unused), *each.shape[1:])])
        if len(each) == size
        else each
        for name, each in weights.items()
    }
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    end = tokenizer["added_tokens"][0]["id"]
    for name in ("config.json", "generation_config.json"):
        if (folder / name).exists():
            config = json.loads((folder / name).read_text())
            changed = dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"), end)
            if "vocab_size" in config:
                changed["vocab_size"] = len(tokens)
            (folder / name).write_text(json.dumps(config | changed))


@contextmanager
def timing() -> Iterator[dict[TranslatingDrafter, float]]:
    """Measure the seconds of translation by drafter."""
    seconds: dict[TranslatingDrafter, float] = defaultdict(float)
    originals = [(kind, name, getattr(kind, name)) for kind, name in TIMED]

    def timed(original: Callable[..., Any]) -> Callable[..., Any]:
        def run(self: TranslatingDrafter, *arguments: Any) -> Any:
            start = time.perf_counter()
            try:
                return original(self, *arguments)
            finally:
                seconds[self] += time.perf_counter() - start

        return run

    for kind, name, original in originals:
        setattr(kind, name, timed(original))
    try:
        yield seconds
    finally:
        for kind, name, original in originals:
            setattr(kind, name, original)


def measure(models: Models, drafters: dict[str, str], options: argparse.Namespace, temperature: float) -> Any:
    systems = {
        name: SecondguessSystem(
            ModelsWithOwnCaches(models), drafter, options.controller if drafter != "none" else None
        )
        for name, drafter in drafters.items()
    }
    prompts = [models.target.encode(text)[-512:] for text in load_workload(None, options.num_prompts).prompts]
    in_turns(systems, prompts[:1], 32, temperature, 0)
    runs: dict[str, list[Any]] = {name: [] for name in systems}
    with timing() as seconds:
        for number, prompt in enumerate(prompts):
            for name, run in in_turns(systems, [prompt], options.max_tokens, temperature, number).items():
                runs[name].append(run)
    found: dict[str, Any] = {}
    for name, of_system in runs.items():
        rounds = sum(run.stats.num_rounds for run in of_system)
        decoding = sum(run.seconds - run.stats.seconds["prefill"] for run in of_system)
        drafted = sum(run.stats.num_drafted for run in of_system)
        found[name] = {
            "tau": sum(run.stats.num_tokens for run in of_system) / rounds,
            "acceptance": sum(run.stats.num_accepted for run in of_system) / drafted if drafted else None,
            "tokens_per_second": sum(run.num_tokens for run in of_system) / decoding,
            "translation": seconds.get(systems[name]._drafter, 0.0) / sum(run.seconds for run in of_system),
            "greedy_texts_equal": temperature > 0
            or all(run.texts == plain.texts for run, plain in zip(of_system, runs["plain"], strict=True)),
        }
    return found


def measure_transformers(
    target: Path, other: Path, prompts: list[list[int]], options: argparse.Namespace, temperature: float
) -> dict[str, float]:
    """Return tokens/s of `generate`, prefill included: plain, and with a draft model with another tokenizer.

    A first run of each, which is not counted, allocates memory.
    """
    dtype = torch.bfloat16 if options.dtype == "auto" else getattr(torch, options.dtype)
    model, assistant = (TransformersModel(path, dtype, torch.device("cpu")) for path in (target, other))
    tokenizers = {
        "assistant_model": assistant.module,
        "tokenizer": AutoTokenizer.from_pretrained(target),
        "assistant_tokenizer": AutoTokenizer.from_pretrained(other),
    }
    config = GenerationConfig(
        max_new_tokens=options.max_tokens,
        do_sample=temperature > 0,
        temperature=temperature or None,
        top_k=0,
        pad_token_id=0,
    )
    systems: dict[str, dict[str, Any]] = {"plain": {}, "assistant_tokenizer": tokenizers}
    seconds: dict[str, list[float]] = {name: [] for name in systems}
    with quiet(), torch.inference_mode():
        for number, prompt in enumerate([prompts[0], *prompts]):
            ids = torch.tensor([prompt])
            for name, arguments in systems.items():
                torch.manual_seed(number)
                start = time.perf_counter()
                model.module.generate(
                    ids, attention_mask=torch.ones_like(ids), generation_config=config, **arguments
                )
                seconds[name].append(time.perf_counter() - start)
    return {name: len(prompts) * options.max_tokens / sum(each[1:]) for name, each in seconds.items()}


def seconds_to_follow(pair: VocabularyPair, tokens: list[int], length: int) -> float:
    """Return the median seconds to follow a commit of 4 tokens behind a text of that many."""
    text = (tokens * (length // len(tokens) + 2))[: length + 400]
    view = DraftView(pair.target, pair.draft, pair.special, pair.direct)
    view.follow(text[:length])
    seconds = []
    for end in range(length + 4, length + 400, 4):
        row = text[:end]
        start = time.perf_counter()
        view.follow(row)
        seconds.append(time.perf_counter() - start)
    return median(seconds)


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--model", default="builtin")
    parser.add_argument("--draft", default="builtin-draft")
    parser.add_argument("--keep", type=float, nargs="+", default=[0.6], help="share of the merges")
    parser.add_argument("--controller", help="default: the drafter's own")
    parser.add_argument("--temperature", type=float, nargs="+", default=[0.0, 1.0])
    parser.add_argument("--num-prompts", type=int, default=8)
    parser.add_argument("--max-tokens", type=int, default=64)
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--transformers", action="store_true", help="run `generate` of Transformers too")
    options = parser.parse_args()
    models = Models(options.model, options.dtype, "cpu")
    record: dict[str, Any] = {"arguments": vars(options) | {"output": None}}
    with tempfile.TemporaryDirectory() as folder:
        drafters = {"plain": "none", "same": f"model:{options.draft}"}
        for keep in options.keep:
            other = Path(folder) / f"keep-{keep:g}"
            write_other_model(Path(find_checkpoint(options.draft)), other, keep)
            for method in ("intersection", "string"):
                drafters[f"{method} {keep:g}"] = f"model:{other},vocab={method}"
        for temperature in options.temperature:
            record[f"temperature {temperature:g}"] = measure(models, drafters, options, temperature)
            if options.transformers:
                prompts = [
                    models.target.encode(text)[-512:]
                    for text in load_workload(None, options.num_prompts).prompts
                ]
                # `generate` fails if the target has all tokens of the draft model.
                with_unused = Path(folder) / "with-unused"
                if not with_unused.exists():
                    write_other_model(
                        Path(find_checkpoint(options.draft)), with_unused, options.keep[-1], ("<|unused|>",)
                    )
                record[f"transformers {options.keep[-1]:g}, temperature {temperature:g}"] = (
                    measure_transformers(
                        Path(find_checkpoint(options.model)), with_unused, prompts, options, temperature
                    )
                )
        for name, drafter in list(drafters.items())[2:]:
            system = SecondguessSystem(models, drafter)
            assert isinstance(system._drafter, TranslatingDrafter)
            pair, tokens = system._drafter.pair, models.target.encode(Path(__file__).read_text())
            seconds = {length: seconds_to_follow(pair, tokens, length) for length in (200, 4000)}
            record[name] = pair.as_dict() | {"follow": seconds}
    record["arguments"] |= {name: public_name(record["arguments"][name]) for name in ("model", "draft")}
    print(json.dumps(record, indent=1))
    store(options, record, num_threads=torch.get_num_threads(), dtype=options.dtype)


if __name__ == "__main__":
    main()
