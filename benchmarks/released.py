"""Measure released models: loading, accuracy, token ids and speed, beside llama.cpp.

    python tools/released all --folders
    python -m venv peer && peer/bin/pip install xllamacpp
    python benchmarks/released.py --load --accuracy --tokens --speed --peer peer/bin/python --output released.json

Without `--peer` only this engine is measured. The models are those of `tools/released`.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import Any

import torch
from common import make_parser, store
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tools" / "released"))

from released_models import RELEASES, Release

from secondguess.api import LLM, load
from secondguess.checkpoint.loaded import LoadedModel
from secondguess.checkpoint.loader import load_model, read_module
from secondguess.checkpoint.plan import Checkpoint
from secondguess.checkpoint.source import Source, open_source
from secondguess.core import Draft, Row
from secondguess.sampling import SamplingParams

HERE = Path(__file__).parent
PROMPT = "def quicksort(items):"
KINDS = ("code", "chat", "prose")
TOKENS_PER_TEXT = 256
NUM_LISTED = 1000
"""Most probable tokens that llama.cpp lists; the divergence takes the others together."""
WIDTHS, PREFILL = (1, 5, 9), 300
GENERATED = 128
QUANTIZATIONS = (None, "int8", "int4")
REQUESTS = (
    "Write a Python function that merges two sorted lists into one sorted list, and show how it is called.",
    "Explain in three sentences why the sky is blue.",
    "Write a short story about a lighthouse keeper who finds a letter in a bottle.",
    "Rewrite this function with type hints and a docstring:\n\ndef area(shape):\n    if shape['kind'] == 'circle':\n"
    "        return 3.14159 * shape['radius'] ** 2\n    if shape['kind'] == 'square':\n        return shape['side'] ** 2\n"
    "    raise ValueError(shape['kind'])",
    "List the steps to bake a loaf of bread.",
    "Write an SQL query that returns the ten customers with the highest total of orders in 2026.",
)
"""Requests whose answers speed is measured on, up to their ends."""
PIECES = [
    " ", "  ", "    ", "\t", "\n", "\n\n", "\r\n", " \n", "0", "7", "42", "2027", "3.14", "1,000", "a", "the", "The", " of",
    "don't", "I'LL", "x_1", "camelCase", "def f(x):", "==", "!=", "->", "...", "--", "(", ")", "[1]", "{}", "\"", "'", "`", "\\n",
    "é", "ß", "Ωμέγα", "привет", "שלום", "مرحبا", "हिन्दी", "ไทย", "日本語", "中文", "한국어", "かな", "、", "。", "\uff01",
    "🙂", "👩\u200d💻", "🇸🇮", "❤\ufe0f", "\u00a0", "\u200b", "\u3000", "\u2028", "\ufeff", "\ufffd", "\x00", "\x07", "\x1b",
    "\x7f", "½", "²", "①", "٣", "१", "\U0001d538", "ﬁ", "ǅ", "<", ">", "<|im_start|>", "<|im_end|>", "<|endoftext|>",
    "<|fim_prefix|>", "<bos>", "<eos>", "<start_of_turn>", "<unused7>",
]  # fmt: skip
"""Pieces of generated strings: spaces, digits, scripts, emoji, control characters and special tokens.

Not among them: decomposed characters, which Qwen's published tokenizer composes and llama.cpp does not, and `</s>`, which
llama.cpp takes for a special token of any model.
"""


class Peer:
    """llama.cpp's server for a model.

    Args:
        python: a Python that has `xllamacpp`.
        release: the model.
    """

    def __init__(self, python: Path, release: Release) -> None:
        command = [str(python), str(HERE / "peers" / "llama_server.py"), str(release.path)]
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
        )
        assert self._process.stdout is not None
        self._address = self._process.stdout.readline().strip()

    def post(self, path: str, **body: Any) -> Any:
        request = urllib.request.Request(
            f"{self._address}{path}", json.dumps(body).encode(), {"Content-Type": "application/json"}
        )
        with urllib.request.urlopen(request) as reply:
            return json.load(reply)

    def token_ids(self, text: str) -> list[int]:
        """Return the token ids of a text, with special tokens where it has their texts."""
        ids: list[int] = self.post("/tokenize", content=text, parse_special=True, add_special=False)["tokens"]
        return ids

    def most_probable(self, tokens: Sequence[int]) -> tuple[Tensor, Tensor]:
        """Return the ids and log-probabilities of the most probable tokens after some tokens."""
        reply = self.post(
            "/completion",
            prompt=list(tokens),
            n_predict=1,
            n_probs=NUM_LISTED,
            temperature=0,
            cache_prompt=True,
        )
        found = reply["completion_probabilities"][0]["top_logprobs"]
        return torch.tensor([token["id"] for token in found]), torch.tensor(
            [token["logprob"] for token in found], dtype=torch.float64
        )

    def generate(self, tokens: Sequence[int], count: int) -> float:
        """Return the tokens per second of a greedy completion of at most `count` tokens."""
        start = time.perf_counter()
        reply = self.post(
            "/completion", prompt=list(tokens), n_predict=count, temperature=0, cache_prompt=False
        )
        return float(reply["tokens_predicted"]) / (time.perf_counter() - start)

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()


@contextmanager
def running(options: argparse.Namespace, release: Release) -> Iterator[Peer | None]:
    """Return a context with a peer; None without `--peer`."""
    peer = Peer(options.peer, release) if options.peer else None
    try:
        yield peer
    finally:
        if peer is not None:
            peer.close()


def seconds_until_output(command: Sequence[str], **environment: str) -> float:
    """Return the time from the start of a command to the first byte that it prints."""
    start = time.perf_counter()
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, env=os.environ | environment
    ) as process:
        assert process.stdout is not None
        process.stdout.read(1)
        taken = time.perf_counter() - start
        process.communicate()
    if process.returncode:
        raise SystemExit(f"{' '.join(command)} ended with exit code {process.returncode}")
    return taken


def measure_load(options: argparse.Namespace, release: Release) -> dict[str, Any]:
    """Return seconds from the start of a process to its first output: `generate`, `inspect`, and the peer's first token."""
    command = [str(Path(sys.executable).with_name("secondguess"))]
    found: dict[str, list[float]] = {}
    folders = [str(release.folder)] if release.folder.is_dir() else []
    for _ in range(options.repeats):
        with tempfile.TemporaryDirectory() as cache:
            for model in (str(release.path), *folders):
                generate = [*command, "generate", "--model", model, PROMPT, "--max-tokens", "1"]
                for when in ("first", "later"):
                    name = f"{when}, {'file' if model == str(release.path) else 'folder'}"
                    seconds = seconds_until_output(generate, SECONDGUESS_CACHE=cache)
                    found.setdefault(name, []).append(seconds)
            inspect = [*command, "inspect", str(release.path)]
            found.setdefault("inspect", []).append(seconds_until_output(inspect, SECONDGUESS_CACHE=cache))
        if options.peer:
            start = time.perf_counter()
            with running(options, release) as peer:
                assert peer is not None
                peer.generate(peer.token_ids(PROMPT), 1)
                found.setdefault("llama.cpp", []).append(time.perf_counter() - start)
    return {name: round(median(seconds), 2) for name, seconds in found.items()}


def texts(tokenizer: Any) -> dict[str, list[int]]:
    """Return the token ids of a text of each kind."""
    found = {}
    for kind in KINDS:
        if kind == "chat":
            messages = json.loads((HERE / "texts" / "chat.json").read_text(encoding="utf-8"))
            text = (
                tokenizer.apply_chat_template(messages, tokenize=False)
                if tokenizer.chat_template
                else "\n\n".join(f"{message['role']}: {message['content']}" for message in messages)
            )
        else:
            text = (HERE / "texts" / f"{kind}.txt").read_text(encoding="utf-8")
        ids = tokenizer(text, add_special_tokens=False).input_ids
        first = [] if tokenizer.bos_token_id is None else [tokenizer.bos_token_id]
        found[kind] = [*first, *ids][:TOKENS_PER_TEXT]
    return found


def divergence(exact: Tensor, found: Tensor) -> Tensor:
    """Return the KL divergence of each row of log-probabilities from the exact one, in nats per token."""
    return (exact.exp() * (exact - found)).sum(-1)


def grouped(logs: Tensor, ids: Tensor) -> Tensor:
    """Return the log-probabilities `[listed + 1]` of some tokens, and of all others together."""
    listed = logs[ids]
    rest = (1 - listed.exp().sum()).clamp_min(1e-12).log()
    return torch.cat((listed, rest[None]))


def compared(exact: Tensor, found: Tensor, tokens: Sequence[int]) -> dict[str, float]:
    """Return divergences from exact log-probabilities `[token, vocabulary]`, and the perplexity of a text."""
    kl, following = divergence(exact, found), torch.tensor(tokens[1:])
    losses = -found[torch.arange(len(following)), following]
    return {
        "kl": float(kl.mean()),
        "largest_kl": float(kl.max()),
        "same_top": float((exact.argmax(-1) == found.argmax(-1)).double().mean()),
        "perplexity": float(losses.mean().exp()),
    }


def reference(source: Source) -> Callable[[Sequence[int]], Tensor]:
    """Return a function that computes exact log-probabilities `[token, vocabulary]` in float32."""
    module = read_module(source, source.config, torch.float32, torch.device("cpu")).eval()

    def logs(tokens: Sequence[int]) -> Tensor:
        with torch.inference_mode():
            return module(torch.tensor([list(tokens)])).logits[0, :-1].double().log_softmax(-1)

    return logs


def logs_of(loaded: LoadedModel, tokens: Sequence[int]) -> Tensor:
    return loaded.runtime.probe(torch.tensor([list(tokens)])).logits[0, :-1].double().log_softmax(-1)


def measure_accuracy(options: argparse.Namespace, release: Release) -> dict[str, Any]:
    """Return the divergence from float32 of each encoding of the file and of the folder, and of llama.cpp on the file."""
    report: dict[str, Any] = {}
    for model in (release.path, release.folder):
        if not model.exists():
            continue
        source = open_source(str(model))
        samples = texts(source.tokenizer)
        exact_of = reference(source)
        exact = {kind: exact_of(tokens) for kind, tokens in samples.items()}
        del exact_of
        name = "file" if model == release.path else "folder"
        for quantize in QUANTIZATIONS:
            plan = Checkpoint.resolve(str(model), dtype="bfloat16", device="cpu", quantize=quantize)
            loaded = load_model(plan)
            label = f"{name}, {quantize or 'as it is'}, {loaded.runtime_description}"
            found = {kind: logs_of(loaded, tokens) for kind, tokens in samples.items()}
            report[label] = {kind: compared(exact[kind], found[kind], samples[kind]) for kind in KINDS}
            if name == "file" and quantize is None:
                report |= compare_with_peer(options, release, samples, exact, found)
            del loaded
    return report


def compare_with_peer(
    options: argparse.Namespace,
    release: Release,
    samples: dict[str, list[int]],
    exact: dict[str, Tensor],
    found: dict[str, Tensor],
) -> dict[str, Any]:
    """Return the divergences of llama.cpp and of ours over the tokens that llama.cpp lists."""
    report: dict[str, Any] = {"llama.cpp": {}, "ours over the same tokens": {}}
    with running(options, release) as peer:
        if peer is None:
            return {}
        for kind, tokens in samples.items():
            values: dict[str, list[float]] = {"llama.cpp": [], "ours over the same tokens": []}
            for position in range(len(tokens) - 1):
                ids, listed = peer.most_probable(tokens[: position + 1])
                expected = grouped(exact[kind][position], ids)
                rest = (1 - listed.exp().sum()).clamp_min(1e-12).log()
                values["llama.cpp"].append(float(divergence(expected, torch.cat((listed, rest[None])))))
                own = grouped(found[kind][position], ids)
                values["ours over the same tokens"].append(float(divergence(expected, own)))
            for name, numbers in values.items():
                report[name][kind] = {"kl": sum(numbers) / len(numbers), "largest_kl": max(numbers)}
    return report


def measure_tokens(options: argparse.Namespace, release: Release) -> dict[str, Any]:
    """Return how many generated strings have other token ids than in llama.cpp, with examples."""
    rng, tokenizer = random.Random(0), open_source(str(release.path)).tokenizer
    different = []
    with running(options, release) as peer:
        if peer is None:
            return {}
        for _ in range(options.strings):
            text = "".join(rng.choices(PIECES, k=rng.randint(1, 8)))
            own, other = tokenizer(text, add_special_tokens=False).input_ids, peer.token_ids(text)
            if own != other:
                different.append({"text": text, "own": own, "llama.cpp": other})
    return {"strings": options.strings, "different": len(different), "examples": different[:10]}


def time_passes(loaded: LoadedModel) -> dict[str, float]:
    """Return the median milliseconds of passes over some tokens after a prompt, and the seconds of its prefill."""
    runtime, generator = loaded.runtime, torch.Generator().manual_seed(0)
    tokens = torch.randint(100, 40_000, (PREFILL + 1,), generator=generator).tolist()
    report, prefills = {}, []
    for _ in range(4):
        row = Row(list(tokens), SamplingParams())
        runtime.reset_prefix_cache()
        start = time.perf_counter()
        runtime.begin([row])
        prefills.append(time.perf_counter() - start)
        for width in WIDTHS:
            draft, times = Draft.chains([tokens[: width - 1]]), []
            for _ in range(12):
                start = time.perf_counter()
                runtime.score([row], draft)
                times.append(1000 * (time.perf_counter() - start))
                runtime.rewind([row], [len(tokens) - 1])
            report[f"{width} tokens"] = round(median(times[2:]), 2)
        runtime.release(row)
    return report | {f"prefill of {PREFILL}": round(median(prefills[1:]), 3)}


def generate(llm: LLM, tokens: Sequence[int]) -> float:
    """Return the tokens per second of a greedy completion."""
    start = time.perf_counter()
    output = llm.generate(list(tokens), max_tokens=GENERATED, temperature=0)
    return len(output.token_ids) / (time.perf_counter() - start)


def requests(tokenizer: Any) -> list[list[int]]:
    """Return the token ids of requests, as conversations where the model has a chat template."""
    if not tokenizer.chat_template:
        return [tokenizer(text).input_ids for text in REQUESTS]
    return [
        tokenizer.apply_chat_template(
            [{"role": "user", "content": text}], add_generation_prompt=True, return_dict=False
        )
        for text in REQUESTS
    ]


def measure_speed(options: argparse.Namespace, release: Release) -> dict[str, Any]:
    """Return times of passes, and tokens/s of greedy answers by systems that run in turns, for file and folder."""
    report = {"file": speeds_of(options, release, release.path)}
    if release.folder.is_dir():
        report["folder"] = speeds_of(options, release, release.folder)
    return report


def speeds_of(options: argparse.Namespace, release: Release, model: Path) -> dict[str, Any]:
    """Return times of passes and tokens/s of one form of a model; those of llama.cpp are of the file."""
    plain, default = load(str(model), "none"), load(str(model))
    prompts = requests(plain.target.tokenizer)
    speeds: dict[str, list[float]] = {}
    report = {"passes": time_passes(plain.target)}
    with running(options, release) as peer:
        for number in range(options.repeats + 1):
            for tokens in prompts:
                runs = {
                    f"default ({default.drafter.name})": generate(default, tokens),
                    "plain": generate(plain, tokens),
                }
                if peer is not None:
                    runs["llama.cpp"] = peer.generate(tokens, GENERATED)
                for name, speed in runs.items() if number else ():
                    speeds.setdefault(name, []).append(speed)
    return report | {
        name: {"median": round(median(found), 1), "from": round(min(found), 1), "to": round(max(found), 1)}
        for name, found in speeds.items()
    }


MEASURES = {
    "load": measure_load,
    "accuracy": measure_accuracy,
    "tokens": measure_tokens,
    "speed": measure_speed,
}


def main() -> None:
    parser = make_parser(__doc__)
    for name, measure in MEASURES.items():
        parser.add_argument(f"--{name}", action="store_true", help=str(measure.__doc__))
    parser.add_argument("--models", nargs="+", choices=RELEASES, default=list(RELEASES))
    parser.add_argument("--peer", type=Path, help="a Python that has xllamacpp")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--strings", type=int, default=10_000)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    report: dict[str, Any] = {}
    for name, measure in MEASURES.items():
        for model in options.models if getattr(options, name) else ():
            report.setdefault(name, {})[model] = found = measure(options, RELEASES[model])
            print(json.dumps({name: {model: found}}, indent=1, ensure_ascii=False), flush=True)
    store(
        options,
        report,
        num_threads=options.threads,
        models={name: RELEASES[name].path for name in options.models},
    )


if __name__ == "__main__":
    main()
