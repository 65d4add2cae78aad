"""Send requests generated from the server's own OpenAPI document; none may end in an internal error.

    python benchmarks/server_fuzz.py --examples 10000 --output fuzz.json

Starts `secondguess serve` with the built-in pair and short outputs. schemathesis generates as many
valid as invalid requests for each operation that reads a body. Exit code 1 if a reply
has status 500 or above, other than 503, or is an error without OpenAI's form.
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

import schemathesis
from common import make_parser, store
from hypothesis import HealthCheck, Phase, given, seed, settings
from schemathesis.generation.modes import GenerationMode
from server_process import serve

ERROR_FIELDS = {"message", "type", "param", "code"}
TIMEOUT = 600.0
NUM_WITHOUT_BODY = 10
"""Requests to an operation that reads no body."""


def fuzz(
    schema: Any, model: str, num_examples: int, random_seed: int = 0, **call_options: object
) -> Counter[tuple[str, int]]:
    """Send generated requests to an application; return the counts of statuses by operation.

    Args:
        schema: schemathesis' schema of the application.
        model: a served name; another one would be refused before anything else is looked at.
        num_examples: number of requests to all operations that read a body together.
        random_seed: seed of the requests.
        call_options: options of schemathesis' `Case.call`.

    Raises:
        AssertionError: a reply that is an internal error, or an error without OpenAI's form.
    """
    statuses: Counter[tuple[str, int]] = Counter()
    operations = [found.ok() for found in schema.get_all_operations()]
    num_pairs = len(GenerationMode) * sum(bool(each.body) for each in operations)

    def send(case: Any) -> None:
        if isinstance(case.body, dict) and "model" in case.body:
            case.body["model"] = model
        reply = case.call(**call_options)
        statuses[case.operation.label, reply.status_code] += 1
        check_reply(reply.status_code, reply.content)

    for operation in operations:
        for mode in GenerationMode if operation.body else (GenerationMode.POSITIVE,):
            chosen = settings(
                max_examples=-(-num_examples // num_pairs) if operation.body else NUM_WITHOUT_BODY,
                deadline=None,
                database=None,
                phases=[Phase.generate, Phase.shrink],
                suppress_health_check=list(HealthCheck),
            )
            seed(random_seed)(chosen(given(operation.as_strategy(generation_mode=mode))(send)))()
    return statuses


def check_reply(status: int, content: bytes) -> None:
    """Refuse an internal error, and an error without OpenAI's form."""
    assert status < 500 or status == 503, content
    if status >= 400:
        assert set(json.loads(content)["error"]) == ERROR_FIELDS, content


def main() -> int:
    parser = make_parser(__doc__)
    parser.add_argument(
        "--examples", type=int, default=10_000, help="number of requests, over all operations"
    )
    parser.add_argument("--max-output-tokens", type=int, default=4)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    limits = ["--max-output-tokens", str(options.max_output_tokens), "--max-samples", "4"]
    failure = ""
    with tempfile.TemporaryDirectory() as folder, serve(limits, log=Path(folder) / "log") as server:
        schema = schemathesis.openapi.from_url(f"{server.address}/openapi.json")
        try:
            statuses = fuzz(schema, "builtin", options.examples, options.seed, timeout=TIMEOUT)
        except AssertionError as error:
            statuses, failure = Counter(), str(error)
        log = (Path(folder) / "log").read_text(encoding="utf-8", errors="replace")
    counts = {f"{operation} {status}": count for (operation, status), count in sorted(statuses.items())}
    report = {
        "examples": statuses.total(),
        "replies": counts,
        "failure": failure,
        "tracebacks": log.count("Traceback (most recent call last)"),
    }
    print(json.dumps(report, indent=1))
    if failure or report["tracebacks"]:
        print(log[-8000:])
    store(options, report, num_threads=0, seed=options.seed)
    return 1 if failure or report["tracebacks"] else 0


if __name__ == "__main__":
    sys.exit(main())
