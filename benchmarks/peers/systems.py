"""Other local engines as benchmark systems that run in turn with ours.

Each runs in its own process and environment, with its own kernels, threads and sampling; only
token ids are exchanged.
"""

from __future__ import annotations

import json
import re
import subprocess
from collections.abc import Sequence
from pathlib import Path

from secondguess.bench.systems import Run, System

MAX_ATTEMPTS = 4
"""Maximum number of attempts, since llama.cpp's programs sometimes exit before logging times."""


class PeerError(RuntimeError):
    """Failure of an engine; the message contains the engine's own output."""


class OpenVino(System):
    """OpenVINO GenAI's pipelines behind `openvino_peer.py`, loaded once and shared by its systems.

    Args:
        process: process returned by `start`.
        draft_length: tokens to draft per round; 0 for plain decoding.
        label: precision, for the name.
    """

    def __init__(self, process: subprocess.Popen[str], draft_length: int, label: str) -> None:
        self._process = process
        self._draft_length = draft_length
        self.family = f"openvino {label}"
        self.speculates = draft_length > 0
        self.name = f"{self.family} {f'draft {draft_length}' if draft_length else 'plain'}"

    @staticmethod
    def start(
        python: Path, target: Path, drafter: Path, num_threads: int, precision: str
    ) -> subprocess.Popen[str]:
        script = Path(__file__).with_name("openvino_peer.py")
        command = [python, script, target, drafter, str(num_threads), precision]
        process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        assert process.stdout is not None
        if not process.stdout.readline():
            raise PeerError(f"expected OpenVINO to start, got exit {process.wait()} from {script.name}")
        return process

    def generate(
        self, prompts: Sequence[Sequence[int]], num_tokens: int, temperature: float, seed: int
    ) -> Run:
        (prompt,) = prompts
        request = {
            "prompt": list(prompt),
            "num_tokens": num_tokens,
            "temperature": temperature,
            "seed": seed,
            "draft_length": self._draft_length,
        }
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps(request) + "\n")
        self._process.stdin.flush()
        answer = json.loads(self._process.stdout.readline() or '{"error": "the process ended"}')
        if "error" in answer:
            raise PeerError(f"{self.name}: {answer['error']}")
        return Run([answer["tokens"]], answer["seconds"])


class LlamaCpp(System):
    """llama.cpp's programs, one call per text, timed by their own clock without model loading.

    Args:
        programs: directory of the built programs.
        target, drafter: GGUF files, made by `to_gguf.py`.
        draft_length: tokens to draft per round; 0 for plain decoding.
        num_threads: threads of each program.
        label: precision, for the name.
    """

    def __init__(
        self, programs: Path, target: Path, drafter: Path, draft_length: int, num_threads: int, label: str
    ) -> None:
        self.family = f"llama.cpp {label}"
        self.speculates = draft_length > 0
        self.name = f"{self.family} {f'draft {draft_length}' if draft_length else 'plain'}"
        program = "llama-speculative-simple" if draft_length else "llama-completion"
        drafting = ["-md", drafter, "--spec-type", "draft-simple", "--spec-draft-n-max", str(draft_length)]
        common = [
            "-m",
            target,
            "-t",
            str(num_threads),
            "-c",
            "1024",
            "--load-mode",
            "none",
            "--samplers",
            "temperature",
        ]
        more = drafting if draft_length else ["-no-cnv", "--ignore-eos"]
        self._command = [str(word) for word in (programs / program, *common, *more)]

    def generate(
        self, prompts: Sequence[Sequence[int]], num_tokens: int, temperature: float, seed: int
    ) -> Run:
        (prompt,) = prompts
        text = "".join(f"<{token}>" for token in prompt)
        asked = ["-p", text, "-n", str(num_tokens), "--temp", str(temperature), "--seed", str(seed)]
        for _ in range(MAX_ATTEMPTS):
            done = subprocess.run([*self._command, *asked], capture_output=True, text=True, check=False)
            said = done.stdout + done.stderr
            tokens = [int(token) for token in re.findall(r"<(\d+)>", done.stdout)][len(prompt) :]
            if done.returncode or not tokens:
                raise PeerError(f"{self.name}: {said[-300:]}")
            if "total time" in said:
                break
        else:
            raise PeerError(f"{self.name}: no times in what it logged")
        if self.speculates:  # may overrun by part of a draft, hence scaled per token
            found = re.findall(r"(?:encoded|decoded)\s+(\d+) tokens in\s+([\d.]+) seconds", said)
            (_, prompt_seconds), (count, seconds) = found
            total = float(prompt_seconds) + float(seconds) * num_tokens / int(count)
        else:
            total = float(re.findall(r"total time =\s+([\d.]+) ms", said)[-1]) / 1000
        return Run([tokens[:num_tokens]], total)
