"""Run a server for a long time under hostile load, and check every reply, its memory and its queue.

    python benchmarks/server_soak.py --minutes 20 --clients 32 --output soak.json

Starts `secondguess serve` with the built-in pair. Each client sends one request after the other,
of a random kind: requests with a known answer (greedy or seeded; completions, chats, structured
replies, streams), streams that the client leaves, invalid bodies, prompts of 1 MB and schemas that
are expensive to compile. The known answers are computed first, by `LLM.generate`. At the end the
server is killed and started again. Exit code 1 if a check fails.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from statistics import median
from threading import Event
from typing import Any

import httpx2
from common import make_parser, store
from server_process import ServerProcess, free_port, serve

from secondguess import load
from secondguess.bench.tables import table
from secondguess.sampling import SamplingParams
from secondguess.server.conversations import ChatTemplate, Conversation
from secondguess.server.served_model import ServedModel
from secondguess.workloads.loading import BUILTIN_PROMPTS

Json = dict[str, Any]

BY_DESIGN = {429, 503}
"""Statuses of a server that has no room: the queue is full, or no memory is free."""
SETTLE_SECONDS = 60.0
"""The start, in which caches grow; memory is compared with its end."""
MAX_GROWTH = 0.05
SAMPLE_SECONDS = 1.0
REQUEST_SECONDS = 600.0
PROMPTS = BUILTIN_PROMPTS[:6]
SETTINGS: tuple[Json, ...] = (
    {"temperature": 0.0},
    {"temperature": 1.0, "seed": 1},
    {"temperature": 0.7, "top_p": 0.9, "seed": 2},
)
PERSON = {
    "type": "object",
    "properties": {"name": {"enum": ["Ada", "Alan"]}, "age": {"type": "integer", "maximum": 99}},
    "required": ["name", "age"],
    "additionalProperties": False,
}

GARBAGE: tuple[bytes | Json, ...] = (
    b"",
    b"{",
    b"[" * 50_000,
    b"\xff\xfe\x00",
    b'{"model": "builtin", "prompt": "\\ud800", "max_tokens": NaN}',
    {},
    {"model": "builtin"},
    {"model": "absent", "prompt": "x"},
    {"model": "builtin", "prompt": {"text": "x"}},
    {"model": "builtin", "prompt": [[1, 2], "x"]},
    {"model": "builtin", "prompt": [10**40]},
    {"model": "builtin", "prompt": [-1]},
    {"model": "builtin", "prompt": []},
    {"model": "builtin", "prompt": "x", "max_tokens": 10**30},
    {"model": "builtin", "prompt": "x", "max_tokens": "8"},
    {"model": "builtin", "prompt": "x", "temperature": 1e308},
    {"model": "builtin", "prompt": "x", "temperature": -1},
    {"model": "builtin", "prompt": "x", "n": 10**9},
    {"model": "builtin", "prompt": "x", "seed": 2**70},
    {"model": "builtin", "prompt": "x", "top_k": -(2**63)},
    {"model": "builtin", "prompt": "x", "logit_bias": {"one": 1}},
    {"model": "builtin", "prompt": "x", "logit_bias": {"99999999": 1}},
    {"model": "builtin", "prompt": "x", "logprobs": 10**6},
    {"model": "builtin", "prompt": "x", "speculation": {"draft_length": 10**9}},
    {"model": "builtin", "prompt": "x", "stop": ["x"] * 5000},
    {"model": "builtin", "prompt": "x", "unknown": {"a": [1] * 1000}},
    {"model": "builtin", "prompt": "x", "structured_outputs": {"regex": "("}},
)
"""Bodies of `/v1/completions`, each of which is refused."""


def nested(depth: int) -> str:
    """Return a schema of arrays in arrays as JSON, which may be too deep for `json.dumps`."""
    return '{"items":' * depth + "{}" + "}" * depth


def hostile_bodies() -> list[tuple[str, bytes]]:
    """Return paths and bodies with grammars that are expensive to compile, or too deep."""
    grammars = [
        {"json": {"enum": [f"value {number}" for number in range(4000)]}},
        {"json": {"anyOf": [{"const": "x" * length} for length in range(1, 300)]}},
        {"json": {"$ref": "#/$defs/a", "$defs": {"a": {"anyOf": [{"$ref": "#/$defs/a"}]}}}},
        {"json": {"type": "string", "pattern": "(a|aa)*" * 50, "minLength": 1000}},
        {"json": {"type": "array", "minItems": 100_000, "items": {"type": "integer"}}},
        {"regex": "(" * 500 + "a" + ")" * 500},
        {"regex": "((a{0,100}){0,100}){0,100}"},
        {"regex": "(a?){2000}a{2000}"},
        {"regex": "[a-z]{1,30000}"},
        {"regex": "|".join(f"word{number}" for number in range(7000))},
        {"grammar": "start: start start | "},
        {"grammar": 'start: a\na: b b b b\nb: c c c c\nc: d d d d\nd: "x" | "y" | d d'},
        {"grammar": "start: /(" + "a|" * 10_000 + "a)*/"},
    ]
    texts = [json.dumps(grammar) for grammar in grammars]
    depths = (40, 300, 450, 600, 800, *range(900, 1001, 4))
    texts += [f'{{"json": {nested(depth)}}}' for depth in depths]
    common = '{"model": "builtin", "max_tokens": 8, '
    bodies = [("/v1/completions", f'{common}"prompt": "x", "structured_outputs": {text}}}') for text in texts]
    for depth in depths:
        function = f'{{"name": "f", "parameters": {nested(depth)}}}'
        tools = f'"tools": [{{"type": "function", "function": {function}}}], "tool_choice": "required"'
        messages = '"messages": [{"role": "user", "content": "x"}]'
        bodies.append(("/v1/chat/completions", f"{common}{messages}, {tools}}}"))
    return [(path, text.encode()) for path, text in bodies]


HOSTILE = hostile_bodies()
"""Requests that are refused, or answered, but never with an internal error."""


class CheckError(Exception):
    """A reply differs from what it must be."""


@dataclass(frozen=True)
class Known:
    """Request with a known answer."""

    path: str
    body: Json
    text: str


@dataclass
class Findings:
    """Counts of one run.

    Args:
        replies: number of replies by kind of request and outcome: a status, or `left`.
        failures: descriptions of replies that are wrong.
        megabytes: resident memory over time, as pairs of seconds and MB.
        health_seconds: durations of `/health`, which the event loop answers.
    """

    replies: Counter[tuple[str, str]] = field(default_factory=Counter)
    failures: list[str] = field(default_factory=list)
    megabytes: list[tuple[float, float]] = field(default_factory=list)
    health_seconds: list[float] = field(default_factory=list)

    @property
    def growth(self) -> float:
        """Largest memory after the start, relative to that at its end."""
        settled = [value for seconds, value in self.megabytes if seconds >= SETTLE_SECONDS]
        return max(settled) / settled[0] - 1 if settled else 0.0


def known_answers(num_tokens: int) -> list[Known]:
    """Return requests with the texts that `LLM.generate` gives for them."""
    llm, found = load(), []
    template = ChatTemplate(ServedModel.from_llm(llm))
    for place, prompt in enumerate(PROMPTS):
        for settings in SETTINGS:
            length = num_tokens * (1 + place % 3) // 2
            fields = {**settings, "max_tokens": length}
            for extra, more in (({}, {}), ({"speculation": "off"}, {}), structured(place)):
                params = SamplingParams(**fields, **more)
                text = llm.generate(prompt, params).text
                found.append(Known("/v1/completions", {"prompt": prompt, **fields, **extra}, text))
            messages = [{"role": "user", "content": prompt}]
            ids = template.encode(Conversation(messages))
            text = llm.generate(ids, SamplingParams(**fields)).text
            found.append(Known("/v1/chat/completions", {"messages": messages, **fields}, text))
    return found


def structured(place: int) -> tuple[Json, Json]:
    """Return the fields of a structured reply in a request, and those of `SamplingParams`."""
    if place % 2:
        return {"structured_outputs": {"json": PERSON}}, {"grammar": {"json_schema": PERSON}}
    return {"structured_outputs": {"regex": "[a-z]{3,9}"}}, {"grammar": {"regex": "[a-z]{3,9}"}}


class Soak:
    """Clients of one server.

    Args:
        http: client of the server.
        known: requests with known answers.
        findings: receives what happens.
        seed: of the choice of requests.
    """

    def __init__(self, http: httpx2.AsyncClient, known: list[Known], findings: Findings, seed: int) -> None:
        self._http = http
        self._known = known
        self._findings = findings
        self._random = random.Random(seed)
        self._kinds: Mapping[Callable[[], Any], float] = {
            self.leave_stream: 1 / 3,
            self.send_garbage: 1 / 10,
            self.send_long_prompt: 1 / 60,
            self.send_hostile_schema: 1 / 30,
            self.check_stream: 1 / 4,
            self.check_reply: 4 / 15,
        }

    async def run(self, end: float) -> None:
        """Send one request after the other until a moment has passed."""
        while time.monotonic() < end:
            (kind,) = self._random.choices(list(self._kinds), list(self._kinds.values()))
            try:
                outcome = await kind()
            except (CheckError, httpx2.HTTPError) as error:
                outcome = "wrong"
                self._findings.failures.append(f"{kind.__name__}: {type(error).__name__}: {error!s:.300}")
            self._findings.replies[kind.__name__, outcome] += 1
            if outcome in map(str, BY_DESIGN):
                await asyncio.sleep(1)

    async def check_reply(self) -> str:
        """Compare a whole reply with its known answer."""
        known = self._random.choice(self._known)
        reply = await self._post(known.path, {**known.body, "model": "builtin"})
        if reply.status_code == 200:
            choice = reply.json()["choices"][0]
            _compare(known, choice["message"]["content"] if "message" in choice else choice["text"])
        return self._outcome(reply, 200)

    async def check_stream(self) -> str:
        """Compare a stream with its known answer."""
        known = self._random.choice(self._known)
        outcome, text = await self._stream(known)
        if outcome == "200":
            _compare(known, text)
        return outcome

    async def leave_stream(self) -> str:
        """Read a part of a stream, or nothing, and disconnect."""
        known = self._random.choice(self._known)
        outcome, _ = await self._stream(known, most=self._random.randrange(8))
        return "left" if outcome == "200" else outcome

    async def send_garbage(self) -> str:
        """Send a body that is refused."""
        body = self._random.choice(GARBAGE)
        path = self._random.choice(
            ("/v1/completions", "/v1/completions", "/v1/chat/completions", "/v1/responses")
        )
        return self._outcome(await self._post(path, body), 400, 404, 422)

    async def send_long_prompt(self) -> str:
        """Send a prompt of 1 MB, which fills the context."""
        prompt = self._random.choice(PROMPTS)
        body = {"model": "builtin", "prompt": prompt * (10**6 // len(prompt)), "max_tokens": 8}
        return self._outcome(await self._post("/v1/completions", body), 400, 413)

    async def send_hostile_schema(self) -> str:
        """Send a grammar that is expensive to compile."""
        path, body = self._random.choice(HOSTILE)
        return self._outcome(await self._post(path, body), 200, 400)

    async def _post(self, path: str, body: bytes | Json) -> httpx2.Response:
        content = body if isinstance(body, bytes) else json.dumps(body).encode()
        return await self._http.post(path, content=content, headers={"Content-Type": "application/json"})

    async def _stream(self, known: Known, most: int | None = None) -> tuple[str, str]:
        """Return the outcome and the text of a stream, of which at most `most` events are read."""
        text, num_events = "", 0
        body = {**known.body, "model": "builtin", "stream": True}
        async with self._http.stream("POST", known.path, json=body) as reply:
            if reply.status_code != 200:
                await reply.aread()
                return self._outcome(reply, 200), ""
            async for line in reply.aiter_lines():
                if most is not None and num_events >= most:
                    break
                if not line.startswith("data: ") or line == "data: [DONE]":
                    continue
                event = json.loads(line.removeprefix("data: "))
                if "error" in event:
                    raise CheckError(f"an error within a stream: {event['error']}")
                num_events += 1
                choice = event["choices"][0]
                text += choice.get("text") or choice.get("delta", {}).get("content") or ""
        return "200", text

    def _outcome(self, reply: httpx2.Response, *expected: int) -> str:
        if reply.status_code not in {*expected, *BY_DESIGN}:
            raise CheckError(f"expected status {expected}, got {reply.status_code}: {reply.text:.300}")
        return str(reply.status_code)


def _compare(known: Known, text: str) -> None:
    if text != known.text:
        raise CheckError(f"expected the text {known.text!r} for {known.body}, got {text!r}")


def watch(server: ServerProcess, findings: Findings, end: Event) -> None:
    """Record memory and the time of `/health` until the end; on a thread, as the clients' loop is busy."""
    start = time.monotonic()
    with httpx2.Client(base_url=server.address, timeout=REQUEST_SECONDS, trust_env=False) as http:
        while not end.wait(SAMPLE_SECONDS):
            findings.megabytes.append((time.monotonic() - start, server.resident_megabytes()))
            before = time.monotonic()
            http.get("/health").raise_for_status()
            findings.health_seconds.append(time.monotonic() - before)


def http_client(server: ServerProcess) -> httpx2.AsyncClient:
    """Return a client without a limit on connections."""
    limits = httpx2.Limits(max_connections=None, max_keepalive_connections=8)
    return httpx2.AsyncClient(
        base_url=server.address, timeout=REQUEST_SECONDS, limits=limits, verify=False, trust_env=False
    )


async def soak(server: ServerProcess, known: list[Known], options: argparse.Namespace) -> Findings:
    """Load the server for some minutes."""
    findings, has_ended = Findings(), Event()
    watcher = asyncio.create_task(asyncio.to_thread(watch, server, findings, has_ended))
    try:
        async with http_client(server) as http:
            clients = Soak(http, known, findings, options.seed)
            end = time.monotonic() + 60 * options.minutes
            await asyncio.gather(*[clients.run(end) for _ in range(options.clients)])
    finally:
        has_ended.set()
        await watcher
    return findings


def rows_left(server: ServerProcess) -> dict[str, float]:
    """Return the gauges of the engine once they are zero, or after some seconds."""
    names = ("vllm:num_requests_running", "vllm:num_requests_waiting", "secondguess:num_requests")
    deadline = time.monotonic() + 30
    while True:
        gauges = server.gauges()
        left = {name: gauges[name] for name in names}
        if not any(left.values()) or time.monotonic() > deadline:
            return left
        time.sleep(0.2)


async def answers(server: ServerProcess, known: list[Known]) -> Findings:
    """Check every known answer once."""
    findings = Findings()
    async with http_client(server) as http:
        for each in known:
            clients = Soak(http, [each], findings, seed=0)
            try:
                await clients.check_reply()
            except (CheckError, httpx2.HTTPError) as error:
                findings.failures.append(str(error))
    return findings


def run(options: argparse.Namespace) -> Json:
    """Return the report of a soak, a kill and a restart."""
    known = known_answers(options.max_tokens)
    port, started = free_port(), time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        launch = partial(serve, ["--max-waiting", str(options.max_waiting)], port, Path(folder) / "log")
        with launch() as server:
            findings = asyncio.run(soak(server, known, options))
            seconds = time.monotonic() - started
            left = rows_left(server)
            server.process.kill()
            server.process.wait()
        with launch() as server:
            restarted = asyncio.run(answers(server, known[:8]))
        log = (Path(folder) / "log").read_text(encoding="utf-8", errors="replace")
    settled = [value for at, value in findings.megabytes if at >= SETTLE_SECONDS]
    health = sorted(findings.health_seconds)
    return {
        "minutes": seconds / 60,
        "clients": options.clients,
        "replies": {
            f"{kind} {outcome}": count for (kind, outcome), count in sorted(findings.replies.items())
        },
        "num_checked": sum(findings.replies[kind, "200"] for kind in ("check_reply", "check_stream")),
        "failures": findings.failures,
        "tracebacks": log.count("Traceback (most recent call last)"),
        "rows_left": left,
        "megabytes": {
            "after_a_minute": settled[0] if settled else None,
            "last_minute": median(settled[-60:]) if settled else None,
            "most": max(settled, default=None),
            "by_minute": [round(value) for _, value in findings.megabytes[::60]],
        },
        "growth": findings.growth,
        "health_seconds": {
            "median": median(health),
            "p99": health[int(0.99 * len(health))],
            "most": health[-1],
        },
        "failures_after_kill_and_restart": restarted.failures,
        "log": log[-4000:] if "Traceback" in log else "",
    }


def checks(report: Json) -> dict[str, bool]:
    """Return which of the promises hold."""
    return {
        "every reply is right, no 5xx but 503": not report["failures"],
        "no exception in the log": report["tracebacks"] == 0,
        "no row is left": not any(report["rows_left"].values()),
        f"memory grows by at most {MAX_GROWTH:.0%} after a minute": report["growth"] <= MAX_GROWTH,
        "right after kill -9 and restart": not report["failures_after_kill_and_restart"],
    }


def main() -> int:
    parser = make_parser(__doc__)
    parser.add_argument("--minutes", type=float, default=20.0)
    parser.add_argument("--clients", type=int, default=32)
    parser.add_argument("--max-tokens", type=int, default=32, help="tokens of a middling answer")
    parser.add_argument("--max-waiting", type=int, default=256)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    report = run(options)
    found = checks(report)
    print(table(["request and outcome", "number"], [[key, str(n)] for key, n in report["replies"].items()]))
    print()
    print(table(["check", "holds"], [[name, "yes" if holds else "NO"] for name, holds in found.items()]))
    print(json.dumps({key: value for key, value in report.items() if key != "replies"}, indent=1))
    store(options, {**report, "checks": found}, num_threads=0, seed=options.seed)
    return 0 if all(found.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
