"""Measure a server under load: tokens/s, time to first token and time between tokens.

    python benchmarks/server_load.py --model builtin --prompts humaneval --clients 1 4 16
    python benchmarks/server_load.py --against http://127.0.0.1:8080 ...

Starts `secondguess serve` and sends the prompts from 1, 4, ... concurrent clients, each of which
waits for its reply before it sends the next prompt. Runs alternate between the default
(`speculation: "auto"`), plain decoding (`speculation: "off"`) and the other servers named by
`--against`. Prompts are sent as text and each request asks for the same number of tokens; a server
may end earlier, so tokens are counted, not requests.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median

from openai import AsyncOpenAI

from secondguess.workloads.loading import load_workload
from secondguess.workloads.provenance import collect_provenance


@dataclass
class Load:
    """Measurements of one run: all prompts, from a number of clients.

    Args:
        num_tokens: output tokens of all replies.
        seconds: from the first request to the end of the last reply.
        first: seconds to the first token, per request.
        between: mean seconds between tokens, per request.
    """

    num_tokens: int = 0
    seconds: float = 0.0
    first: list[float] = field(default_factory=list)
    between: list[float] = field(default_factory=list)

    @property
    def tokens_per_second(self) -> float:
        return self.num_tokens / self.seconds


@contextmanager
def own_server(options: argparse.Namespace) -> Iterator[str]:
    """Run `secondguess serve` and return its address."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    command = [sys.executable, "-c", "from secondguess.cli import main; main()"]
    command += ["serve", "--port", str(port), "--model", options.model]
    if options.drafter:
        command += ["--drafter", options.drafter]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    address = f"http://127.0.0.1:{port}"
    try:
        wait_until_ready(address, process)
        yield address
    finally:
        process.terminate()
        process.wait(60)


def wait_until_ready(address: str, process: subprocess.Popen[bytes]) -> None:
    """Wait until a server answers; it may still load its weights."""
    while process.poll() is None:
        try:
            with urllib.request.urlopen(f"{address}/ready", timeout=5):
                return
        except OSError:
            time.sleep(0.2)
    raise SystemExit(f"the server ended with code {process.returncode}")


async def ask(
    client: AsyncOpenAI, model: str, prompt: str, options: argparse.Namespace, extra: object
) -> Load:
    """Send one request and measure its stream."""
    start = time.perf_counter()
    stream = await client.completions.create(
        model=model,
        prompt=prompt,
        max_tokens=options.max_tokens,
        temperature=options.temperature,
        seed=options.seed,
        stream=True,
        stream_options={"include_usage": True},
        extra_body=extra,
    )
    load, first, last = Load(), 0.0, 0.0
    async for chunk in stream:
        if chunk.usage is not None:
            load.num_tokens = chunk.usage.completion_tokens
        if chunk.choices:
            last = time.perf_counter()
            first = first or last
    load.first.append(first - start)
    if load.num_tokens > 1:
        load.between.append((last - first) / (load.num_tokens - 1))
    return load


async def run(
    address: str, prompts: list[str], num_clients: int, options: argparse.Namespace, extra: object
) -> Load:
    """Send all prompts from concurrent clients."""
    total, waiting = Load(), list(reversed(prompts))
    async with AsyncOpenAI(base_url=f"{address}/v1", api_key="none", max_retries=0, timeout=600) as client:
        model = (await client.models.list()).data[0].id

        async def work() -> None:
            while waiting:
                load = await ask(client, model, waiting.pop(), options, extra)
                total.num_tokens += load.num_tokens
                total.first += load.first
                total.between += load.between

        start = time.perf_counter()
        await asyncio.gather(*[work() for _ in range(num_clients)])
        total.seconds = time.perf_counter() - start
    return total


def row_of(system: str, num_clients: int, loads: list[Load]) -> dict[str, object]:
    """Return one row of the table, over all repeats of a run."""
    first = sorted(value for load in loads for value in load.first)
    between = [value for load in loads for value in load.between]
    return {
        "system": system,
        "clients": num_clients,
        "tokens_per_second": median([load.tokens_per_second for load in loads]),
        "least_and_most": [
            min(load.tokens_per_second for load in loads),
            max(load.tokens_per_second for load in loads),
        ],
        "first_token_median": median(first),
        "first_token_p99": first[min(int(0.99 * len(first)), len(first) - 1)],
        "between_tokens_median": median(between),
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="builtin")
    parser.add_argument("--drafter", default=None)
    parser.add_argument("--against", nargs="*", default=[], help="addresses of other servers")
    parser.add_argument("--prompts", default=None)
    parser.add_argument("--num-prompts", type=int, default=32)
    parser.add_argument("--max-tokens", type=int, default=96)
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--clients", type=int, nargs="+", default=[1, 4, 16])
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--output", type=Path, default=None, help="a JSON file for results and provenance")
    options = parser.parse_args()
    prompts = list(load_workload(options.prompts, options.num_prompts).prompts)
    table = []
    with own_server(options) as address:
        systems = {
            "default": (address, {"speculation": "auto"}),
            "plain": (address, {"speculation": "off"}),
            **{other: (other, {}) for other in options.against},
        }
        for where, extra in systems.values():  # kernels, caches and the controller warm up
            asyncio.run(run(where, prompts[:4], 1, options, extra))
        for num_clients in options.clients:
            loads: dict[str, list[Load]] = {name: [] for name in systems}
            for _ in range(options.repeats):
                for name, (where, extra) in systems.items():
                    loads[name].append(asyncio.run(run(where, prompts, num_clients, options, extra)))
            for name in systems:
                table.append(row_of(name, num_clients, loads[name]))
                print(json.dumps(table[-1]), flush=True)
    if options.output is not None:
        about = collect_provenance(
            num_threads=0, device="cpu", dtype="auto", seed=options.seed, models={}, runtimes={}
        )
        options.output.write_text(json.dumps({"table": table, "provenance": about.__dict__}, indent=1) + "\n")


if __name__ == "__main__":
    main()
