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
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch
from common import TimeLimit, make_parser, show_table, store
from prompts import prompts
from server_process import LlamaServer, peer_version, serve_llama
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tools" / "released"))

from released_models import RELEASES, Release

from secondguess.bench.systems import Models, SecondguessSystem
from secondguess.checkpoint.gguf.file import GgufFile
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
WIDTHS, PREFILLS = (1, 2, 5, 9), (512, 4000)
BEFORE, PASSES = 300, 12
"""Tokens before the passes that are timed, and passes of each width."""
GENERATED = 64
PEER_CONTEXT = 4608
QUANTIZATIONS = (None, "int8", "int4")
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


def running(options: argparse.Namespace, release: Release) -> AbstractContextManager[LlamaServer | None]:
    """Return a context with llama.cpp's server; None without `--peer`."""
    if not options.peer:
        return nullcontext()
    return serve_llama(options.peer, release.path, context=PEER_CONTEXT, threads=options.threads)


def most_probable(peer: LlamaServer, tokens: Sequence[int]) -> tuple[Tensor, Tensor]:
    """Return the ids and log-probabilities of llama.cpp's most probable tokens after some tokens."""
    body = {"n_predict": 1, "n_probs": NUM_LISTED, "temperature": 0, "cache_prompt": True}
    reply = peer.post("/completion", prompt=list(tokens), **body)
    found = reply["completion_probabilities"][0]["top_logprobs"]
    logprobs = torch.tensor([token["logprob"] for token in found], dtype=torch.float64)
    return torch.tensor([token["id"] for token in found]), logprobs


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
                peer.complete(peer.token_ids(PROMPT), 1)
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
    """Return the divergence from float32 of the file, of llama.cpp on it, and of the folder in each encoding."""
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
        for quantize in QUANTIZATIONS if name == "folder" else (None,):
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
                ids, listed = most_probable(peer, tokens[: position + 1])
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


def random_tokens(count: int, seed: int) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    tokens: list[int] = torch.randint(100, 40_000, (count,), generator=generator).tolist()
    return tokens


class OwnSpeed:
    """Times of ours.

    Args:
        model: path of the model.
    """

    def __init__(self, model: Path) -> None:
        self.models = Models(str(model), "auto", "cpu")
        self._runtime = self.models.target.runtime
        self._plain = SecondguessSystem(self.models, "none")

    def prefill(self, count: int, seed: int) -> float:
        """Return the seconds of a prefill of random tokens."""
        row = Row([*random_tokens(count, seed), 0], SamplingParams())
        self._runtime.reset_prefix_cache()
        start = time.perf_counter()
        self._runtime.begin([row])
        seconds = time.perf_counter() - start
        self._runtime.release(row)
        return seconds

    def passes(self, seed: int) -> dict[int, float]:
        """Return the seconds of a pass over some tokens after a prompt, by their number."""
        row, found = Row(random_tokens(BEFORE + 1, seed), SamplingParams()), {}
        self._runtime.begin([row])
        for width in WIDTHS:
            draft, times = Draft.chains([random_tokens(width - 1, width)]), []
            for _ in range(PASSES):
                start = time.perf_counter()
                self._runtime.score([row], draft)
                times.append(time.perf_counter() - start)
                self._runtime.rewind([row], [BEFORE])
            found[width] = median(times[1:])
        self._runtime.release(row)
        return found

    def decode(self, tokens: Sequence[int]) -> float:
        """Return the tokens per second of a greedy text, without prefill."""
        run = self._plain.generate([tokens], GENERATED, 0.0, 0)
        return run.num_tokens / run.decode_seconds


class PeerSpeed:
    """Times of llama.cpp; the logits of a pass over several tokens are those of the last one only.

    Args:
        server: its server, whose own times are returned.
    """

    def __init__(self, server: LlamaServer) -> None:
        self._server = server

    def prefill(self, count: int, seed: int) -> float:
        return self._server.complete(random_tokens(count, seed), 1).prompt_seconds

    def passes(self, seed: int) -> dict[int, float]:
        before, found = random_tokens(BEFORE, seed), {}
        self._server.complete(before, 1)
        for width in WIDTHS:
            times = []
            for number in range(PASSES):
                following = random_tokens(width, 1 + number)
                done = self._server.complete([*before, *following], 1, cached=True)
                if done.num_prompt_tokens != width:
                    return {}  # with sliding windows it repeats tokens that were cached
                times.append(done.prompt_seconds)
            found[width] = median(times[1:])
        return found

    def decode(self, tokens: Sequence[int]) -> float:
        done = self._server.complete(tokens, GENERATED)
        return done.num_tokens / done.decode_seconds


def read_bandwidth() -> float:
    """Return the bytes per second at which the memory is read, the best of several sums."""
    numbers = torch.ones(1 << 28)
    times = []
    for _ in range(5):
        start = time.perf_counter()
        numbers.sum()
        times.append(time.perf_counter() - start)
    return numbers.numel() * numbers.itemsize / min(times)


def bytes_per_pass(release: Release, model: Path) -> int:
    """Return the bytes of weights that a pass reads, as they are stored: all but an input embedding that is no LM head."""
    tensors = GgufFile(release.path).tensors
    unread = "token_embd.weight" if "output.weight" in tensors else ""
    read = [tensor for name, tensor in tensors.items() if name != unread]
    if model == release.folder:
        return torch.bfloat16.itemsize * sum(tensor.num_elements for tensor in read)
    return sum(tensor.num_bytes for tensor in read)


def measure_speed(options: argparse.Namespace, release: Release) -> dict[str, Any]:
    """Return times of prefill, of passes over some tokens and of plain decoding, ours in turns with llama.cpp's on the file."""
    paths = {"file": release.path, "folder": release.folder}
    return {form: speeds_of(options, release, paths[form]) for form in options.forms if paths[form].exists()}


def speeds_of(options: argparse.Namespace, release: Release, model: Path) -> dict[str, Any]:
    own, limit = OwnSpeed(model), TimeLimit(options.seconds)
    texts = [prompts(own.models.target, kind, 1, GENERATED)[0] for kind in ("code", "chat")]
    found: dict[str, dict[str, list[float]]] = {}
    with running(options, release) as peer:
        systems: dict[str, OwnSpeed | PeerSpeed] = {"ours": own}
        if peer is not None:
            systems["llama.cpp"] = PeerSpeed(peer)
        for system in systems.values():
            system.decode(texts[0])
        for number in range(options.repeats):
            if number and limit.is_over():
                break
            for measure in (
                partial(time_all, texts=texts),
                *(partial(time_prefill, count=count) for count in PREFILLS),
            ):
                order = list(systems) if number % 2 == 0 else list(systems)[::-1]
                for name in order:
                    for what, value in measure(systems[name], seed=number).items():
                        found.setdefault(name, {}).setdefault(what, []).append(value)
    report: dict[str, Any] = {"runtime": own.models.target.runtime_description}
    for name, measures in found.items():
        report[name] = own_report = {what: spread(values) for what, values in measures.items()}
        if "ms of 1" not in own_report:
            continue
        first, *others = (own_report[f"ms of {width}"]["median"] for width in WIDTHS)
        widths = zip(WIDTHS[1:], others, strict=True)
        own_report |= {f"v({width})": round(pass_time / first, 3) for width, pass_time in widths}
    if "llama.cpp" in found:
        report["over llama.cpp"] = {
            what: round(advantage(report["ours"][what], report["llama.cpp"][what], what), 3)
            for what in found["llama.cpp"]
        }
    num_bytes, bandwidth = bytes_per_pass(release, model), read_bandwidth()
    shortest = 1000 * num_bytes / bandwidth
    report["limit"] = {"bytes": num_bytes, "bytes/s": round(bandwidth), "ms of 1": round(shortest, 3)}
    report["share of the limit"] = round(shortest / report["ours"]["ms of 1"]["median"], 3)
    return report


def advantage(ours: dict[str, float], other: dict[str, float], what: str) -> float:
    """Return how many times as fast ours is."""
    quotient = ours["median"] / other["median"]
    return 1 / quotient if what.startswith("ms") else quotient


def time_all(system: OwnSpeed | PeerSpeed, texts: Sequence[Sequence[int]], seed: int) -> dict[str, float]:
    """Return plain tokens/s, and the seconds of passes over some tokens."""
    passes = system.passes(seed)
    speeds = [system.decode(text) for text in texts]
    return {"plain tokens/s": median(speeds)} | {
        f"ms of {width}": 1000 * value for width, value in passes.items()
    }


def time_prefill(system: OwnSpeed | PeerSpeed, count: int, seed: int) -> dict[str, float]:
    return {f"prefill of {count} tokens/s": count / system.prefill(count, seed)}


def spread(values: Sequence[float]) -> dict[str, float]:
    return {
        "median": float(f"{median(values):.4g}"), "least": float(f"{min(values):.4g}"), "largest": float(f"{max(values):.4g}"),
    }  # fmt: skip


def speed_rows(report: Mapping[str, Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return a row per model, form and system of a report of `measure_speed`, with the medians."""
    return [
        {"model": model, "form": form, "system": system}
        | {
            what: value["median"] if isinstance(value, dict) else value
            for what, value in found[system].items()
        }
        for model, forms in report.items()
        for form, found in forms.items()
        for system in ("ours", "llama.cpp", "over llama.cpp")
        if system in found
    ]


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
    parser.add_argument(
        "--forms", nargs="+", choices=("file", "folder"), default=["file", "folder"], help="for --speed"
    )
    parser.add_argument("--peer", type=Path, help="a Python that has xllamacpp, or llama-server")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument(
        "--seconds", type=float, default=60, help="no repeat of --speed starts later, for each file"
    )
    parser.add_argument("--strings", type=int, default=10_000)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    report: dict[str, Any] = {"peer": peer_version(options.peer)}
    for name, measure in MEASURES.items():
        for model in options.models if getattr(options, name) else ():
            report.setdefault(name, {})[model] = found = measure(options, RELEASES[model])
            print(json.dumps({name: {model: found}}, indent=1, ensure_ascii=False), flush=True)
            models = {used: RELEASES[used].path for used in options.models}
            store(options, report, num_threads=options.threads, models=models)
    if options.speed:
        show_table(speed_rows(report["speed"]))


if __name__ == "__main__":
    main()
