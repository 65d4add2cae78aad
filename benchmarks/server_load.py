"""Measure a server under load: tokens/s, time to first token and time between tokens.

    python benchmarks/server_load.py --model builtin --prompts humaneval --clients 1 4 16
    python benchmarks/server_load.py --model pairs/88m/target --drafter model:pairs/88m/drafter \\
        --prompt-tokenizer builtin --peer llama-server=http://127.0.0.1:8080 \\
        --text-peer transformers=http://127.0.0.1:8081

Starts `secondguess serve` and sends the prompts from 1, 4, ... concurrent clients, each of which
waits for its reply before it sends the next prompt. Runs alternate between the default
(`speculation: "auto"`), plain decoding (`speculation: "off"`) and other servers with OpenAI's API.
Each request asks for the same number of tokens; a server may end earlier, so tokens are counted,
not requests. In every run the prompts begin with another comment: otherwise all runs but the first
would find them in the KV cache.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import count
from statistics import median

from common import make_parser, store
from openai import AsyncOpenAI
from server_process import serve
from transformers import AutoTokenizer

from secondguess.builtin import builtin_paths
from secondguess.workloads.loading import load_workload


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


@dataclass(frozen=True)
class System:
    """A server to measure.

    Args:
        address: its URL.
        model: name of its model; empty for the first one that it lists.
        encode: turns a text into a prompt, as text or token ids.
        extra: further fields of its requests.
        keeps_connection: False for a new connection per request: llama-server sometimes closes one that it has
            kept while a request arrives.
    """

    address: str
    model: str
    encode: Callable[[str], str | list[int]]
    extra: dict[str, object] = field(default_factory=dict)
    keeps_connection: bool = True


async def ask(
    client: AsyncOpenAI, model: str, prompt: str | list[int], options: argparse.Namespace, extra: object
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
        if chunk.choices and chunk.choices[0].text:
            last = time.perf_counter()
            first = first or last
    load.first.append(first - start)
    if load.num_tokens > 1:
        load.between.append((last - first) / (load.num_tokens - 1))
    return load


async def run(system: System, texts: Sequence[str], num_clients: int, options: argparse.Namespace) -> Load:
    """Send prompts from concurrent clients."""
    total, waiting = Load(), [system.encode(text) for text in reversed(texts)]
    url = f"{system.address}/v1"
    headers = {} if system.keeps_connection else {"Connection": "close"}
    async with AsyncOpenAI(
        base_url=url, api_key="none", max_retries=0, timeout=600, default_headers=headers
    ) as client:
        model = system.model or (await client.models.list()).data[0].id

        async def work() -> None:
            while waiting:
                load = await ask(client, model, waiting.pop(), options, system.extra)
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
    parser = make_parser(__doc__)
    parser.add_argument("--model", default="builtin")
    parser.add_argument("--drafter", default=None)
    parser.add_argument("--peer", action="append", default=[], help="NAME=URL of another server; repeatable")
    parser.add_argument(
        "--text-peer",
        action="append",
        default=[],
        help="the same, for a server that takes no token ids and requires the path of its model as name",
    )
    parser.add_argument(
        "--prompt-tokenizer",
        default=None,
        help="send token ids of this model's tokenizer, for a model whose own has no real words",
    )
    parser.add_argument("--note", default="", help="text for the output file")
    parser.add_argument("--prompts", default=None)
    parser.add_argument("--num-prompts", type=int, default=32)
    parser.add_argument("--max-tokens", type=int, default=96)
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--clients", type=int, nargs="+", default=[1, 4, 16])
    parser.add_argument("--repeats", type=int, default=3)
    options = parser.parse_args()
    own = ["--model", options.model] + (["--drafter", options.drafter] if options.drafter else [])
    texts = list(load_workload(options.prompts, options.num_prompts).prompts)
    table: list[dict[str, object]] = []
    numbers = count()

    def measured(system: System, num_clients: int, num_prompts: int | None = None) -> Load:
        new = [f"# Run {next(numbers)}\n{text}" for text in texts[:num_prompts]]
        return asyncio.run(run(system, new, num_clients, options))

    with serve(own) as server:
        systems = make_systems(server.address, options)
        for num_clients in options.clients:
            loads: dict[str, list[Load]] = {name: [] for name in systems}
            for system in systems.values():  # kernels and the controller warm up
                measured(system, num_clients, 2 * num_clients)
            for _ in range(options.repeats):
                for name, system in systems.items():
                    loads[name].append(measured(system, num_clients))
            for name in systems:
                table.append(row_of(name, num_clients, loads[name]))
                print(json.dumps(table[-1]), flush=True)
            report = {"table": table, "note": options.note}
            store(options, report, num_threads=0, seed=options.seed)


def make_systems(own_address: str, options: argparse.Namespace) -> dict[str, System]:
    """Return the servers to measure, by name."""

    def encode(text: str) -> str | list[int]:
        return text

    as_text = encode
    if options.prompt_tokenizer is not None:
        tokenizer, own = (
            AutoTokenizer.from_pretrained(path_of(name)) for name in (options.prompt_tokenizer, options.model)
        )

        def encode(text: str) -> str | list[int]:
            return list(map(int, tokenizer(text).input_ids))

        def as_text(text: str) -> str | list[int]:
            return str(own.decode(encode(text)))

    systems = {
        "default": System(own_address, "", encode, {"speculation": "auto"}),
        "plain": System(own_address, "", encode, {"speculation": "off"}),
    }
    for peer in options.peer:
        name, _, address = peer.partition("=")
        systems[name] = System(address, "", encode, keeps_connection=False)
    for peer in options.text_peer:
        name, _, address = peer.partition("=")
        systems[name] = System(address, options.model, as_text)
    return systems


def path_of(model: str) -> str:
    """Return the folder of a model by its name."""
    return str(builtin_paths().target) if model == "builtin" else model


if __name__ == "__main__":
    main()
