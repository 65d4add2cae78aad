"""Compare the default drafter with plain decoding and with llama.cpp's best mode on the same file.

    python tools/released all --folders
    python -m venv peer && peer/bin/pip install xllamacpp
    python benchmarks/best_mode.py --models qwen-1.5b --draft-model qwen-0.5b --peer peer/bin/python --output best.json

`--peer` may also be a `llama-server` (`peers/build_llama_cpp.sh` builds one for the processor at hand; the wheels of
`xllamacpp` use no more than AVX2). Each of its modes continues one prompt of every kind; plain decoding and the fastest
mode of each kind then take part: for every prompt and temperature, ours decode one round of each in turn, and after them
the modes of llama.cpp, in an order that changes. End tokens end a text. Speeds are tokens over all seconds, prefill
included; those of llama.cpp are its own times, without HTTP. A ratio is the median over prompts of the ratio of speeds.
Texts of fewer than 16 tokens do not count. Prompts on which ours is below .95 of plain decoding are decoded again in turns,
and the median of all runs counts.
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from itertools import product
from pathlib import Path
from statistics import median
from typing import Any

import torch
from common import TimeLimit, make_parser, show_table, store
from in_turns import ModelsWithOwnCaches, in_turns
from prompts import prompts
from server_process import Completion, LlamaServer, peer_version, serve_llama

from released import RELEASES, Release
from secondguess.bench.systems import Models, Run, SecondguessSystem
from secondguess.workloads.provenance import public_name

MODES = (
    "plain", "draft-simple:3", "draft-simple:5", "draft-simple:8", "ngram-simple", "ngram-simple:4:8", "ngram-map-k",
    "ngram-map-k4v", "ngram-mod", "ngram-cache",
)  # fmt: skip
PLAIN, OURS = "plain", "ours"
FEWEST_TOKENS = 16
LOWEST = 0.95
SHARE_OF_FIRST_RUNS = 0.85
"""Share of the time that is not kept for repeats."""
Record = dict[str, Any]


def described(num_tokens: int, prefill: float, decoding: float, **more: float | None) -> Record:
    """Return the record of a text: tokens, seconds of its parts, and tokens/s over all of them and without prefill."""
    seconds = {"prefill_seconds": round(prefill, 4), "decode_seconds": round(decoding, 4)}
    speeds = {"speed": num_tokens / (prefill + decoding), "decode_speed": num_tokens / decoding}
    return {"tokens": num_tokens, **seconds, **speeds, **more}


def of_run(run: Run) -> Record:
    assert run.stats is not None
    tau, prefill = round(run.stats.acceptance_length, 3), run.stats.seconds["prefill"]
    return described(run.num_tokens, prefill, run.decode_seconds, tokens_per_pass=tau)


def of_completion(done: Completion) -> Record:
    return described(done.num_tokens, done.prompt_seconds, done.decode_seconds, acceptance=done.acceptance)


class Comparison:
    """Comparison on one model.

    Args:
        options: of the command line.
        release: the model.
        limit: time of this comparison.
    """

    def __init__(self, options: argparse.Namespace, release: Release, limit: TimeLimit) -> None:
        self._options, self._release, self._limit = options, release, limit
        models = Models(str(release.folder if options.folder else release.path), options.dtype, "cpu")
        self.drafter = options.drafter or models.default_drafter
        self.runtime = models.target.runtime_description
        self._ours = {
            name: SecondguessSystem(ModelsWithOwnCaches(models), drafter, ends_texts=True)
            for name, drafter in ((PLAIN, "none"), (OURS, self.drafter))
        }
        self._prompts = {
            kind: prompts(models.target, kind, options.num_prompts, options.max_tokens)
            for kind in options.kinds
        }
        in_turns(self._ours, [self._prompts[options.kinds[0]][0]], 16, 0.0, 0)
        for system in self._ours.values():
            system.reset()
        self.pilot: dict[str, dict[str, Record]] = {}
        self.records: list[Record] = []

    def choose_modes(self) -> list[str]:
        """Return plain decoding and the fastest mode of each kind of prompts; fills `pilot`."""
        options = self._options
        modes = [mode for mode in options.modes if options.draft_model or not mode.startswith("draft")]
        for mode in modes if options.peer else ():
            with self._serve(mode) as server:
                server.complete(self._prompts[options.kinds[0]][0], 8)
                for kind, (first, *_) in self._prompts.items():
                    done = of_completion(server.complete(first, options.max_tokens))
                    self.pilot.setdefault(kind, {})[mode] = done
        best = [
            max(found, key=lambda mode: float(found[mode]["decode_speed"])) for found in self.pilot.values()
        ]
        return list(dict.fromkeys((PLAIN, *best))) if best else []

    def run(self) -> Iterator[None]:
        """Decode the prompts, and again those on which ours is slow; yields after every record."""
        options = self._options
        with ExitStack() as stack:
            servers = {mode: stack.enter_context(self._serve(mode)) for mode in self.choose_modes()}
            for server in servers.values():
                server.complete(self._prompts[options.kinds[0]][0], 8)
            for number, temperature in product(range(options.num_prompts), options.temperature):
                for kind in options.kinds:
                    if self.records and self._limit.is_over(SHARE_OF_FIRST_RUNS):
                        break
                    self.records.append(self._record(servers, kind, number, temperature))
                    yield
        for record in self.records:
            if counts(record) and record["repeats"][0] < LOWEST:
                while len(record["repeats"]) <= options.repeats and not self._limit.is_over():
                    ours = self._decode(record["kind"], record["number"], record["temperature"])
                    record["repeats"].append(ratio(ours, OURS, PLAIN))
                    yield

    def _serve(self, mode: str) -> Any:
        options = self._options
        drafts = RELEASES[options.draft_model].path if mode.startswith("draft") else None
        threads = options.threads
        return serve_llama(options.peer, self._release.path, mode, draft_model=drafts, threads=threads)

    def _decode(self, kind: str, number: int, temperature: float) -> dict[str, Record]:
        prompt = self._prompts[kind][number]
        runs = in_turns(self._ours, [prompt], self._options.max_tokens, temperature, number)
        return {name: of_run(run) for name, run in runs.items()}

    def _record(
        self, servers: Mapping[str, LlamaServer], kind: str, number: int, temperature: float
    ) -> Record:
        systems = self._decode(kind, number, temperature)
        for mode in random.Random(len(self.records)).sample(list(servers), len(servers)):
            done = servers[mode].complete(self._prompts[kind][number], self._options.max_tokens, temperature)
            systems[f"llama.cpp {mode}"] = of_completion(done)
        about = {"kind": kind, "temperature": temperature, "number": number}
        return {**about, "systems": systems, "repeats": [ratio(systems, OURS, PLAIN)]}


def ratio(systems: Mapping[str, Record], first: str, second: str, speed: str = "speed") -> float:
    """Return the speed of one system over that of another."""
    return round(float(systems[first][speed]) / float(systems[second][speed]), 4)


def counts(record: Record) -> bool:
    """Return True if no system ended its text early."""
    return min(system["tokens"] for system in record["systems"].values()) >= FEWEST_TOKENS


def summarise(records: Sequence[Record]) -> list[Record]:
    """Return one row per kind of prompts and temperature."""
    groups: dict[tuple[str, float], list[Record]] = {}
    for record in filter(counts, records):
        groups.setdefault((record["kind"], record["temperature"]), []).append(record)
    rows = []
    for (kind, temperature), found in sorted(groups.items()):
        over_plain = [median(record["repeats"]) for record in found]
        speeds = {
            name: median(record["systems"][name]["speed"] for record in found) for name in found[0]["systems"]
        }
        row: Record = {"kind": kind, "temperature": temperature, "prompts": len(found)}
        row["tokens_per_second"] = {name: round(speed, 1) for name, speed in speeds.items()}
        row["tokens_per_pass"] = median(record["systems"][OURS]["tokens_per_pass"] for record in found)
        row["over_plain"] = spread(over_plain)
        row["below"] = sum(value < LOWEST for value in over_plain)
        peers = [name for name in speeds if name not in (PLAIN, OURS)]
        for measure in ("speed", "decode_speed") if peers else ():
            over = {
                name: [ratio(record["systems"], OURS, name, measure) for record in found] for name in peers
            }
            best = min(peers, key=lambda name: median(over[name]))
            plain = [ratio(record["systems"], PLAIN, f"llama.cpp {PLAIN}", measure) for record in found]
            row[measure] = {"best": best, "over_best": spread(over[best]), "plain_over_plain": spread(plain)}
        rows.append(row)
    return rows


def spread(values: Sequence[float]) -> Record:
    return {"median": round(median(values), 3), "least": min(values), "largest": max(values)}


def shown(model: str, row: Record) -> Record:
    """Return a row for the printed table."""
    speeds, over_plain = row["tokens_per_second"], row["over_plain"]
    found = {"model": model, "prompts": f"{row['kind']} ({row['prompts']})", "T": row["temperature"]}
    found |= {"plain": speeds[PLAIN], "ours": speeds[OURS]}
    found |= {"over plain": over_plain["median"], "least over plain": over_plain["least"]}
    if "speed" in row:
        best, over = row["speed"]["best"], row["speed"]["over_best"]
        found |= {"best of llama.cpp": f"{best.removeprefix('llama.cpp ')} {speeds[best]}"}
        found |= {"over best": over["median"], "least over best": over["least"]}
        found |= {"over best without prefill": row["decode_speed"]["over_best"]["median"]}
        found |= {"plain over plain": row["speed"]["plain_over_plain"]["median"]}
    return found


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--models", nargs="+", choices=RELEASES, default=["smollm2"])
    parser.add_argument("--folder", action="store_true", help="ours decodes the folder in bfloat16")
    parser.add_argument("--drafter", help="ours, instead of the default")
    parser.add_argument("--peer", type=Path, help="a Python that has xllamacpp, or llama-server")
    parser.add_argument("--modes", nargs="+", default=MODES, help="modes of llama.cpp: TYPE[:SIZE...]")
    parser.add_argument("--draft-model", choices=RELEASES, help="draft model of llama.cpp")
    parser.add_argument("--kinds", nargs="+", default=["code", "chat", "prose"], help="see prompts.py")
    parser.add_argument("--temperature", type=float, nargs="+", default=[0.0, 0.7, 1.0])
    parser.add_argument("--num-prompts", type=int, default=8, help="of each kind")
    parser.add_argument("--max-tokens", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=4, help="of prompts on which ours is slow")
    parser.add_argument("--seconds", type=float, default=600, help="for each model, loading included")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--threads", type=int, default=2)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    report: dict[str, Any] = {"peer": peer_version(options.peer), "models": {}}
    used = [RELEASES[name] for name in (*options.models, options.draft_model) if name]
    models = {release.title: release.path for release in used}
    if options.folder:
        models |= {f"{release.title}, folder": release.folder for release in used}
    for name in options.models:
        comparison = Comparison(options, RELEASES[name], TimeLimit(options.seconds))
        report["models"][name] = found = {
            "drafter": public_name(comparison.drafter),
            "pilot": comparison.pilot,
        }
        for _ in comparison.run():
            rows = summarise(comparison.records)
            found |= {"runtime": comparison.runtime, "table": rows, "records": comparison.records}
            store(options, report, num_threads=options.threads, dtype=options.dtype, models=models)
        for kind, modes in comparison.pilot.items():
            print(kind, {mode: round(each["decode_speed"], 1) for mode, each in modes.items()})
        show_table([shown(name, row) for row in summarise(comparison.records)])


if __name__ == "__main__":
    main()
