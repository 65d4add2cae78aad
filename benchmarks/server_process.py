"""Servers as processes of a benchmark: `secondguess serve`, and llama.cpp's."""

from __future__ import annotations

import ctypes
import json
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

COMMAND = [sys.executable, "-c", "import sys; from secondguess.cli import main; sys.exit(main())", "serve"]
LLAMA_SERVER = Path(__file__).parent / "peers" / "llama_server.py"
SET_PARENT_DEATH_SIGNAL = 1
"""Operation of `prctl`."""
END_SECONDS = 60
"""Time in which a server must end after SIGTERM."""


@dataclass
class ServerProcess:
    """A server that runs.

    Args:
        process: the process; its children, if it has any, are not part of it.
        address: its URL.
    """

    process: subprocess.Popen[bytes]
    address: str

    @property
    def peak_memory(self) -> float:
        """Largest resident memory so far, in MB."""
        lines = Path(f"/proc/{self.process.pid}/status").read_text(encoding="utf-8").splitlines()
        return next(int(line.split()[1]) for line in lines if line.startswith("VmHWM")) / 1024


@dataclass
class Completion:
    """Result of a completion by llama.cpp, in the server's own times.

    Args:
        num_tokens: generated tokens.
        num_prompt_tokens: tokens of the prompt that were not cached.
        prompt_seconds: time until they were processed.
        decode_seconds: time of all the rest.
        acceptance: accepted over drafted tokens; None without drafts.
    """

    num_tokens: int
    num_prompt_tokens: int
    prompt_seconds: float
    decode_seconds: float
    acceptance: float | None


class LlamaServer(ServerProcess):
    """llama.cpp's server that runs."""

    def post(self, path: str, **body: Any) -> Any:
        request = urllib.request.Request(
            f"{self.address}{path}", json.dumps(body).encode(), {"Content-Type": "application/json"}
        )
        with urllib.request.urlopen(request) as reply:
            return json.load(reply)

    def token_ids(self, text: str) -> list[int]:
        """Return the token ids of a text, with special tokens where it has their texts."""
        ids: list[int] = self.post("/tokenize", content=text, parse_special=True, add_special=False)["tokens"]
        return ids

    def complete(
        self, tokens: Sequence[int], count: int, temperature: float = 0.0, *, cached: bool = False
    ) -> Completion:
        """Continue a prompt by at most `count` tokens, sampled by temperature alone.

        With `cached`, what the last prompt began with is not processed again.
        """
        reply = self.post(
            "/completion", prompt=list(tokens), n_predict=count, temperature=temperature, samplers=["temperature"],
            seed=0, cache_prompt=cached,
        )  # fmt: skip
        found = reply["timings"]
        drafted = found.get("draft_n")
        return Completion(
            num_tokens=reply["tokens_predicted"],
            num_prompt_tokens=found["prompt_n"],
            prompt_seconds=found["prompt_ms"] / 1000,
            decode_seconds=found["predicted_ms"] / 1000,
            acceptance=found["draft_n_accepted"] / drafted if drafted else None,
        )


@contextmanager
def serve(options: Sequence[str]) -> Iterator[ServerProcess]:
    """Run `secondguess serve` with these options, and a free port, until the context ends."""
    with _running(COMMAND, options, "/ready") as (process, address):
        yield ServerProcess(process, address)


@contextmanager
def serve_llama(
    program: Path,
    model: Path,
    mode: str = "plain",
    *,
    draft_model: Path | None = None,
    context: int = 4096,
    slots: int = 1,
    threads: int = 2,
) -> Iterator[LlamaServer]:
    """Run llama.cpp's server on a free port until the context ends.

    Args:
        program: `llama-server`, or a Python that has `xllamacpp`.
        model: GGUF file.
        mode: see `mode_options`.
        draft_model: GGUF file of the mode `draft-simple`.
        context: tokens of all slots together.
        slots: requests that decode at the same time.
    """
    command = [program, LLAMA_SERVER] if is_python(program) else [program]
    options = ["-m", model, "-t", threads, "-c", context, "-np", slots]
    options += [*mode_options(mode), *(["-md", draft_model] if mode.startswith("draft") else [])]
    if slots > 1:
        options.append("-kvu")
    with _running(list(map(str, command)), list(map(str, options)), "/health") as (process, address):
        yield LlamaServer(process, address)


def peer_version(program: Path | None) -> str | None:
    """Return the program of llama.cpp with its version; None without one."""
    if program is None:
        return None
    asked = ["-c", "import xllamacpp; print(xllamacpp.__version__)"] if is_python(program) else ["--version"]
    done = subprocess.run([program, *asked], capture_output=True, text=True, check=True)
    return (
        f"{'xllamacpp' if is_python(program) else program.name} {(done.stdout + done.stderr).splitlines()[0]}"
    )


def is_python(program: Path) -> bool:
    return program.name.startswith("python")


def mode_options(mode: str) -> list[str]:
    """Return the options of llama.cpp for a mode of speculation.

    >>> mode_options("plain"), mode_options("draft-simple:5")
    ([], ['--spec-type', 'draft-simple', '--spec-draft-n-max', '5'])
    >>> mode_options("ngram-simple:4:8")[2:]
    ['--spec-ngram-simple-size-n', '4', '--spec-ngram-simple-size-m', '8']
    """
    name, *sizes = mode.split(":")
    if name == "plain":
        return []
    names = (
        ["--spec-draft-n-max"]
        if name.startswith("draft")
        else [f"--spec-{name}-size-n", f"--spec-{name}-size-m"]
    )
    return ["--spec-type", name, *(word for pair in zip(names, sizes, strict=False) for word in pair)]


@contextmanager
def _running(
    command: Sequence[str], options: Sequence[str], ready: str
) -> Iterator[tuple[subprocess.Popen[bytes], str]]:
    """Run a server on a free port until the context ends or this process does; its output is discarded."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    process = subprocess.Popen(
        [*command, "--port", str(port), *options],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        preexec_fn=lambda: ctypes.CDLL(None).prctl(SET_PARENT_DEATH_SIGNAL, signal.SIGTERM),
    )
    address = f"http://127.0.0.1:{port}"
    try:
        _wait_until_ready(process, f"{address}{ready}")
        yield process, address
    finally:
        process.terminate()
        try:
            process.wait(END_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _wait_until_ready(process: subprocess.Popen[bytes], url: str) -> None:
    """Wait until a server answers; it may still load its weights."""
    while process.poll() is None:
        try:
            with urllib.request.urlopen(url, timeout=5):
                return
        except OSError:
            time.sleep(0.1)
    raise SystemExit(f"the server ended with code {process.returncode}")
