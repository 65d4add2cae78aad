"""Measure servers under load with chats: tokens/s, time to first token and between tokens, memory.

    python benchmarks/server_load.py --model SmolLM2-135M-Instruct.Q4_1.gguf --peer peer/bin/python --clients 1 4 16

Starts `secondguess serve` and, with `--peer` (a Python that has xllamacpp, or llama-server), a server of llama.cpp for each of
`--modes` on the same file, and sends the prompts from concurrent clients, each of which waits for its reply before it sends
the next prompt. Runs alternate between the systems, in reverse order in every second repeat: ours by default, plain
(`speculation: "off"`) and with drafts of constant length, and the modes of llama.cpp, whose default is plain. End tokens end a
reply, so tokens are counted, not requests. In every run the prompts begin with another number: otherwise all runs but the
first would find them in the KV cache. Servers that are not asked are idle.

`between_tokens` is the mean time between the tokens of a request (median and 99th percentile over requests), `between_chunks` the
time between two pieces of a stream, of which one may have several tokens.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from itertools import count, pairwise
from pathlib import Path
from statistics import median
from typing import Any

from common import TimeLimit, make_parser, show_table, store
from openai import AsyncOpenAI
from prompts import texts
from server_process import ServerProcess, peer_version, serve, serve_llama

from secondguess.builtin import builtin_paths
from secondguess.workloads.provenance import public_name

SLOT_TOKENS = 1024
"""Context of each request of llama.cpp."""


@dataclass
class Load:
    """Measurements of one run: all prompts, from a number of clients.

    Args:
        num_tokens: output tokens of all replies.
        seconds: from the first request to the end of the last reply.
        first: seconds to the first token, per request.
        between: mean seconds between tokens, per request.
        gaps: seconds between the pieces of the streams.
    """

    num_tokens: int = 0
    seconds: float = 0.0
    first: list[float] = field(default_factory=list)
    between: list[float] = field(default_factory=list)
    gaps: list[float] = field(default_factory=list)

    @property
    def tokens_per_second(self) -> float:
        return self.num_tokens / self.seconds


@dataclass(frozen=True)
class System:
    """Way to ask a server.

    Args:
        server: the server.
        extra: further fields of its requests.
        keeps_connection: False for a new connection per request: llama.cpp's server sometimes closes one that it has
            kept while a request arrives.
    """

    server: ServerProcess
    extra: dict[str, object] = field(default_factory=dict)
    keeps_connection: bool = True


async def ask(client: AsyncOpenAI, model: str, text: str, options: argparse.Namespace, extra: object) -> Load:
    """Send one request and measure its stream."""
    start = time.perf_counter()
    stream = await client.chat.completions.create(
        model=model,
        messages=[{"role": "user", "content": text}],
        max_tokens=options.max_tokens,
        temperature=options.temperature,
        seed=options.seed,
        stream=True,
        stream_options={"include_usage": True},
        extra_body=extra,
    )
    load, times = Load(), []
    async for chunk in stream:
        if chunk.usage is not None:
            load.num_tokens = chunk.usage.completion_tokens
        if chunk.choices and chunk.choices[0].delta.content:
            times.append(time.perf_counter())
    load.first = [times[0] - start]
    load.gaps = [later - earlier for earlier, later in pairwise(times)]
    if load.num_tokens > 1:
        load.between = [(times[-1] - times[0]) / (load.num_tokens - 1)]
    return load


async def run(system: System, prompts: Sequence[str], num_clients: int, options: argparse.Namespace) -> Load:
    """Send prompts from concurrent clients."""
    total, waiting = Load(), list(reversed(prompts))
    headers = {} if system.keeps_connection else {"Connection": "close"}
    url = f"{system.server.address}/v1"
    async with AsyncOpenAI(
        base_url=url, api_key="none", max_retries=0, timeout=600, default_headers=headers
    ) as client:
        model = (await client.models.list()).data[0].id

        async def work() -> None:
            while waiting:
                load = await ask(client, model, waiting.pop(), options, system.extra)
                total.num_tokens += load.num_tokens
                for name in ("first", "between", "gaps"):
                    getattr(total, name).extend(getattr(load, name))

        start = time.perf_counter()
        await asyncio.gather(*[work() for _ in range(num_clients)])
        total.seconds = time.perf_counter() - start
    return total


def row_of(name: str, num_clients: int, loads: Sequence[Load], system: System) -> dict[str, object]:
    """Return one row of the table, over all repeats of a run."""
    speeds = [load.tokens_per_second for load in loads]
    row: dict[str, object] = {
        "system": name,
        "clients": num_clients,
        "tokens_per_second": median(speeds),
        "least_and_most": [min(speeds), max(speeds)],
        "peak_memory_mb": round(system.server.peak_memory),
    }
    named = {"first_token": "first", "between_tokens": "between", "between_chunks": "gaps"}
    for measure, attribute in named.items():
        values = sorted(value for load in loads for value in getattr(load, attribute)) or [0.0]
        row[f"{measure}_median"] = median(values)
        row[f"{measure}_p99"] = values[min(int(0.99 * len(values)), len(values) - 1)]
    return row


def start_systems(stack: ExitStack, options: argparse.Namespace) -> dict[str, System]:
    """Start the servers; return the ways to ask them, by name."""
    model, slots = options.model, max(options.clients)
    drafter = ["--drafter", options.drafter] if options.drafter else []
    own = stack.enter_context(serve(["--model", model, *drafter]))
    speculation: dict[str, Any] = {
        "default": "auto", "plain": "off", f"drafts of {options.draft_length}": {"draft_length": options.draft_length},
    }  # fmt: skip
    systems = {name: System(own, {"speculation": value}) for name, value in speculation.items()}
    for mode in options.modes if options.peer else ():
        sizes = {"context": SLOT_TOKENS * slots, "slots": slots}
        server = serve_llama(
            options.peer, Path(model), mode, draft_model=options.draft_model, threads=options.threads, **sizes
        )
        systems[f"llama.cpp {mode}"] = System(
            stack.enter_context(server), {"samplers": ["temperature"]}, False
        )
    return systems


def measure(options: argparse.Namespace, systems: dict[str, System], table: list[dict[str, object]]) -> None:
    """Fill the table, and store it after every number of clients."""
    prompts, numbers, limit = texts(options.kind, options.num_prompts), count(), TimeLimit(options.seconds)
    path = builtin_paths().target if options.model == "builtin" else Path(options.model)

    def measured(system: System, num_clients: int, num_prompts: int) -> Load:
        new = [f"({next(numbers)}) {text}" for text in prompts[:num_prompts]]
        return asyncio.run(run(system, new, num_clients, options))

    for position, num_clients in enumerate(options.clients):
        num_prompts = max(options.prompts_per_client * num_clients, options.fewest_prompts)
        loads: dict[str, list[Load]] = {name: [] for name in systems}
        for system in systems.values():  # kernels and the controller warm up
            measured(system, num_clients, num_clients)
        for repeat in range(options.repeats):
            for name in list(systems)[:: 1 if repeat % 2 == 0 else -1]:
                loads[name].append(measured(systems[name], num_clients, num_prompts))
            if limit.is_over((position + 1) / len(options.clients)):
                break
        for name, system in systems.items():
            table.append(row_of(name, num_clients, loads[name], system))
            print(json.dumps(table[-1]), flush=True)
        report = {"table": table, "note": options.note, "peer": peer_version(options.peer)}
        store(
            options,
            report,
            num_threads=options.threads,
            seed=options.seed,
            models={public_name(options.model): path},
        )


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--model", default="builtin")
    parser.add_argument("--drafter", help="ours, instead of the default")
    parser.add_argument("--draft-length", type=int, default=4, help="of the drafts of constant length")
    parser.add_argument("--peer", type=Path, help="a Python that has xllamacpp, or llama-server")
    parser.add_argument("--modes", nargs="+", default=["plain", "ngram-simple:4:8"], help="of llama.cpp")
    parser.add_argument("--draft-model", type=Path, help="GGUF file of llama.cpp's mode draft-simple")
    parser.add_argument("--note", default="", help="text for the output file")
    parser.add_argument("--kind", default="chat", help="kind of prompts, see prompts.py")
    parser.add_argument("--num-prompts", type=int, default=64)
    parser.add_argument("--prompts-per-client", type=int, default=2)
    parser.add_argument("--fewest-prompts", type=int, default=8)
    parser.add_argument("--max-tokens", type=int, default=96)
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--clients", type=int, nargs="+", default=[1, 4, 16])
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=600, help="no repeat starts after a share of them")
    parser.add_argument("--threads", type=int, default=2, help="of llama.cpp")
    options = parser.parse_args()
    table: list[dict[str, object]] = []
    with ExitStack() as stack:
        measure(options, start_systems(stack, options), table)
    show_table(table)


if __name__ == "__main__":
    main()
