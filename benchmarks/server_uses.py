"""Measure what a server saves in edits of code, structured replies and further turns of a chat.

    python benchmarks/server_uses.py --output uses.json

- Edit: the reply is a text of which the request's `prediction` is a version with one identifier
  renamed. Target passes with and without it.
- Structured reply: a JSON object by schema. Target passes and tokens/s without a drafter, with the
  tokens that the schema forces drafted or not.
- Second turn: tokens and seconds of prefill of a chat's first turn, with 400 tokens of history, and
  of its second.
- Long prompt: a prompt of 2,000 tokens arrives while 8 streams decode. The time between two chunks of
  a stream meanwhile, beyond that of a round before, in rounds, at the 99th percentile and the longest,
  and the prompt's own prefill time.

All with the built-in models, over HTTP. Passes do not depend on the machine; seconds do.
"""

from __future__ import annotations

import json
import keyword
import random
import re
import sys
import time
import urllib.request
from http.client import HTTPResponse
from itertools import pairwise
from statistics import median, quantiles
from threading import Thread
from typing import Any

from common import make_parser, store
from server_process import ServerProcess, serve

from secondguess.bench.tables import table
from secondguess.workloads.loading import BUILTIN_PROMPTS

Json = dict[str, Any]

EDIT_PROMPT = "def parse(text):\n    lines = text.split()\n    for line in lines:\n        line = line.strip()\n        if"
NUM_STREAMS, NUM_STREAMED, NUM_LONG, STREAM_SECONDS = 8, 1000, 2000, 3.0
"""Streams that decode, their tokens, tokens of the prompt that arrives, and time before it does."""
CUSTOMER = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "age": {"type": "integer"},
        "address": {
            "type": "object",
            "properties": {"street": {"type": "string", "maxLength": 12}, "country": {"enum": ["NO", "PE"]}},
            "required": ["street", "country"],
            "additionalProperties": False,
        },
        "subscribed": {"type": "boolean"},
    },
    "required": ["name", "age", "address", "subscribed"],
    "additionalProperties": False,
}


def send(server: ServerProcess, path: str, **fields: object) -> HTTPResponse:
    """Send a request, which asks for statistics, and return the reply before its body is read."""
    body = json.dumps({"model": "builtin", "report": True, **fields}).encode()
    request = urllib.request.Request(server.address + path, body, {"Content-Type": "application/json"})
    reply: HTTPResponse = urllib.request.urlopen(request, timeout=300)
    return reply


def post(server: ServerProcess, path: str, **fields: object) -> Json:
    """Return the reply to a request, with statistics."""
    with send(server, path, **fields) as reply:
        found: Json = json.load(reply)
    return found


def statistics(reply: Json) -> Json:
    """Return the counters of a reply's sample."""
    (sample,) = reply["secondguess"]["samples"]
    found: Json = sample
    return found


def with_renamed_identifier(text: str) -> str:
    """Return a text with another name for the identifier that it uses most."""
    names = re.findall(r"[A-Za-z_]{3,}", text)
    name = max(set(names) - set(keyword.kwlist), key=lambda each: (names.count(each), each))
    return re.sub(rf"\b{name}\b", "amount", text)


def measure_edit(server: ServerProcess) -> Json:
    """Return the number of passes of edits, over several texts."""
    passes = {"plain": 0, "default": 0, "prediction": 0, "prediction, draft_length 16": 0}
    for seed, temperature in ((2, 0.8), (3, 0.8), (2, 0.6), (4, 0.6)):
        fields = {"prompt": EDIT_PROMPT, "max_tokens": 200, "seed": seed, "temperature": temperature}
        plain = post(server, "/v1/completions", **fields, speculation="off")
        text = plain["choices"][0]["text"]
        guess = {"prediction": {"type": "content", "content": with_renamed_identifier(text)}}
        replies = {
            "plain": plain,
            "default": post(server, "/v1/completions", **fields),
            "prediction": post(server, "/v1/completions", **fields, **guess),
            "prediction, draft_length 16": post(
                server, "/v1/completions", **fields, **guess, speculation={"draft_length": 16}
            ),
        }
        for name, reply in replies.items():
            if reply["choices"][0]["text"] != text:
                raise SystemExit(f"expected the same text with {name}")
            passes[name] += statistics(reply)["num_rounds"]
    saved = {f"fewer_than_{name}": passes[name] / passes["prediction"] for name in ("plain", "default")}
    return {"passes": passes, **saved}


def measure_structured(server: ServerProcess, repeats: int) -> Json:
    """Return passes and seconds of structured replies, with and without forced tokens as drafts."""
    passes = {"off": 0, "auto": 0}
    ratios = []
    for seed in range(repeats):
        seconds = {}
        for speculation in passes:
            start = time.perf_counter()
            reply = post(
                server,
                "/v1/completions",
                prompt="A customer as JSON:\n",
                max_tokens=150,
                seed=seed,
                structured_outputs={"json": CUSTOMER},
                speculation=speculation,
            )
            seconds[speculation] = time.perf_counter() - start
            passes[speculation] += statistics(reply)["num_rounds"]
        ratios.append(seconds["off"] / seconds["auto"])
    return {"passes": passes, "fewer_passes": passes["off"] / passes["auto"], "faster": median(ratios)}


def measure_second_turn(server: ServerProcess) -> Json:
    """Return the prefill of two turns of a chat; the first has about 400 tokens of history."""
    history = "\n".join(BUILTIN_PROMPTS)
    messages = [{"role": "user", "content": history}]
    turns = []
    for question in ("Now write a test of the first function.", ""):
        reply = post(
            server, "/v1/chat/completions", messages=messages, max_tokens=48, temperature=0, speculation="off"
        )
        usage = reply["usage"]
        cached = usage["prompt_tokens_details"]["cached_tokens"]
        turns.append(
            {
                "prompt_tokens": usage["prompt_tokens"],
                "prefilled_tokens": usage["prompt_tokens"] - cached,
                "prefill_seconds": statistics(reply)["seconds"]["prefill"],
            }
        )
        messages += [
            {"role": "assistant", "content": reply["choices"][0]["message"]["content"]},
            {"role": "user", "content": question},
        ]
    first, second = turns
    return {
        "turns": turns,
        "share_of_tokens": second["prefilled_tokens"] / first["prefilled_tokens"],
        "share_of_seconds": second["prefill_seconds"] / first["prefill_seconds"],
    }


def measure_long_prompt(server: ServerProcess, speculation: str) -> Json:
    """Return by how many rounds a prompt of 2,000 tokens delays 8 streams that decode."""
    # other tokens each time: a prefix that is cached already is not prefilled
    token_ids = random.Random(speculation).choices(range(300, 6000), k=NUM_LONG)
    arrivals: list[list[float]] = [[] for _ in range(NUM_STREAMS)]

    def read(place: int) -> None:
        length = {"max_tokens": NUM_STREAMED, "min_tokens": NUM_STREAMED}
        fields = {"prompt": BUILTIN_PROMPTS[place], "seed": place, **length}
        with send(server, "/v1/completions", **fields, stream=True, speculation=speculation) as reply:
            arrivals[place] += [time.perf_counter() for line in reply if line.startswith(b"data: {")]

    readers = [Thread(target=read, args=(place,)) for place in range(NUM_STREAMS)]
    for reader in readers:
        reader.start()
    time.sleep(STREAM_SECONDS)
    start = time.perf_counter()
    post(server, "/v1/completions", prompt=token_ids, max_tokens=1)
    end = time.perf_counter()
    for reader in readers:
        reader.join()
    gaps = [pair for times in arrivals for pair in pairwise(times)]
    alone = [
        later - earlier for earlier, later in gaps if start - 0.8 * STREAM_SECONDS < earlier and later < start
    ]
    during = [later - earlier for earlier, later in gaps if later > start and earlier < end]
    round_seconds = median(alone)
    return {
        "round_seconds": round_seconds,
        "prefill_seconds": end - start,
        "delay_in_rounds_before": delays(alone, round_seconds),
        "delay_in_rounds": delays(during, round_seconds),
    }


def delays(gaps: list[float], round_seconds: float) -> Json:
    """Return by how many rounds times between chunks exceed a round."""
    return {
        name: found / round_seconds - 1
        for name, found in (
            ("median", median(gaps)),
            ("p99", quantiles(gaps, n=100)[98]),
            ("longest", max(gaps)),
        )
    }


def main() -> int:
    parser = make_parser(__doc__)
    parser.add_argument("--repeats", type=int, default=10)
    options = parser.parse_args()
    with serve([]) as server:
        report: Json = {"second_turn": measure_second_turn(server), "edit": measure_edit(server)}
        report["long_prompt"] = {each: measure_long_prompt(server, each) for each in ("off", "auto")}
    with serve(["--drafter", "none"]) as server:
        report["structured"] = measure_structured(server, options.repeats)
    edit, structured, turn = report["edit"], report["structured"], report["second_turn"]
    rows = [
        ["edit: passes, plain / with prediction", f"{edit['fewer_than_plain']:.2f}", "4"],
        ["edit: passes, default / with prediction", f"{edit['fewer_than_default']:.2f}", ""],
        ["structured: passes, without / with forced tokens", f"{structured['fewer_passes']:.2f}", ""],
        ["structured: speed, with / without forced tokens", f"{structured['faster']:.2f}", "1.3"],
        ["second turn: share of the first's prefill, tokens", f"{turn['share_of_tokens']:.3f}", "below 0.2"],
        [
            "second turn: share of the first's prefill, seconds",
            f"{turn['share_of_seconds']:.3f}",
            "below 0.2",
        ],
    ]
    for name, found in report["long_prompt"].items():
        where = f"long prompt next to 8 streams, speculation {name}"
        for each in ("p99", "longest"):
            delay = found["delay_in_rounds"][each]
            rows.append([f"{where}: {each} delay in rounds", f"{delay:.2f}", "at most 3"])
        rows.append([f"{where}: its prefill, seconds", f"{found['prefill_seconds']:.2f}", ""])
    print(table(["figure", "value", "goal"], rows))
    print(json.dumps(report, indent=1))
    store(options, report, num_threads=0)
    return 0


if __name__ == "__main__":
    sys.exit(main())
