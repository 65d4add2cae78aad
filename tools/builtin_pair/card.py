"""Model cards of a trained pair, with every number read from the training run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch

from builtin_pair.checkpoints import read_checkpoint, read_decoder
from builtin_pair.evaluate import Acceptance, PairFigures
from builtin_pair.model import Decoder, fast_dtype
from secondguess.api import LLM
from secondguess.files import write_atomically
from secondguess.workloads.provenance import collect_provenance

SAMPLE_PROMPTS = (
    "def quicksort(items):",
    'def is_prime(number: int) -> bool:\n    """Return whether the number is prime.\n\n'
    '    >>> is_prime(7)\n    True\n    """\n',
)


def write_cards(directory: Path, figures: PairFigures, llm: LLM, seed: int) -> None:
    """Write ``README.md`` next to both exported models of a finished run; ``llm`` is the target."""
    manifest = json.loads((directory / "manifest.json").read_text(encoding="utf-8"))
    summary = json.loads((directory / "tokens" / "summary.json").read_text(encoding="utf-8"))
    shared = "\n".join([_figures(figures), _data(manifest, summary), _training(directory, seed)])
    target, drafter = (_shape(read_decoder(directory / f"{name}.pt")) for name in ("target", "drafter"))
    texts = {
        "target": _target_head(target) + shared + _samples(llm),
        "drafter": _drafter_head(drafter) + shared,
    }
    for name, text in texts.items():
        with write_atomically(directory / name / "README.md") as stream:
            stream.write((_FRONT_MATTER + text).encode())


_FRONT_MATTER = """---
license: apache-2.0
library_name: transformers
pipeline_tag: text-generation
tags: [code, python, speculative-decoding]
---
"""


def _shape(decoder: Decoder) -> str:
    shape = decoder.shape
    return (
        f"Llama architecture, {shape.num_layers} layer{'s' if shape.num_layers > 1 else ''} of width {shape.hidden_size}, "
        f"{shape.num_heads} heads of {shape.head_size} ({shape.num_kv_heads} for keys and values), "
        f"feed-forward width {shape.mlp_size}, tied embeddings, {shape.vocab_size:,} tokens, "
        f"{sum(each.numel() for each in decoder.parameters()) / 1e6:.1f} million parameters, bf16."
    )


def _target_head(shape: str) -> str:
    return f"""
# secondguess built-in target: a small model that completes Python

{shape}

The large half of the pair that comes with `secondguess`: it exists so that speculative decoding can be tried, tested and
measured offline. It writes text that looks like Python; it does not understand programming, and its code is seldom right.
Trained on windows of at most 512 tokens: longer contexts work, less well.
"""


def _drafter_head(shape: str) -> str:
    return f"""
# secondguess built-in drafter: drafts for the built-in target

{shape}

The small half of the pair that comes with `secondguess`; it has the target's tokenizer and is of no use alone.
"""


def _row(name: str, acceptance: Acceptance) -> str:
    return f"| {name} | {acceptance.greedy:.3f} | {acceptance.sampled:.3f} | {acceptance.positions:,} |"


def _figures(figures: PairFigures) -> str:
    return f"""
## Figures

Held-out text: target {figures.target_bits_per_byte:.3f} bits per byte, drafter {figures.drafter_bits_per_byte:.3f}.

Acceptance of one drafted token, as the text's every position would have it (temperature 0: both models prefer the same
token; temperature 1: overlap of their distributions):

| text | temperature 0 | temperature 1 | positions |
|---|---|---|---|
{_row("held-out files", figures.held_out)}
{_row("written by the target at temperature 0", figures.own_greedy)}
{_row("written by the target at temperature 1", figures.own_sampled)}
"""


def _data(manifest: dict[str, Any], summary: dict[str, Any]) -> str:
    packages = "\n".join(
        f"| {package['name']} | {package['version']} | {package['licence'][:60]} | {package['num_files']} | "
        f"{package['num_bytes'] / 1e6:.2f} |"
        for package in manifest["packages"]
    )
    return f"""
## Data

Python source of the standard library and of packages whose metadata declare a permissive licence: whole files
({summary["files"]["bytes"] / 1e6:.0f} MB) and, once more, every short documented function by itself
({summary["functions"]["bytes"] / 1e6:.0f} MB); together {(summary["files"]["tokens"] + summary["functions"]["tokens"]) / 1e6:.0f}
million tokens. Tests, vendored copies, generated and tabular files are left out, identical files are read once, and
{summary["held_out"]["bytes"] / 1e6:.1f} MB (every fiftieth file, chosen by a hash of its text) are held out.
{_screening(manifest)}

<details><summary>Packages, versions, declared licences, files, MB</summary>

| package | version | licence | files | MB |
|---|---|---|---|---|
{packages}

</details>
"""


def _screening(manifest: dict[str, Any]) -> str:
    count = manifest.get("forbidden_prompts", 0)
    if not count:
        return "The text was not searched for evaluation prompts."
    return f"No file contains the signature and docstring of any of {count} evaluation prompts (HumanEval)."


def _stage(checkpoint: Path) -> str:
    content = read_checkpoint(checkpoint)
    return (
        f"{content['step']:,} steps, {content['tokens'] / 1e6:.1f} million tokens, "
        f"{content['seconds'] / 60:.0f} minutes"
    )


def _training(directory: Path, seed: int) -> str:
    where = collect_provenance(
        num_threads=torch.get_num_threads(), device="cpu", dtype="bfloat16", seed=seed, models={}, runtimes={}
    )
    products = "with" if fast_dtype() == torch.bfloat16 else "without"
    return f"""
## Training

- Target: {_stage(directory / "target.pt")}. Next-token cross-entropy; Muon for the matrices, AdamW for the rest; few
  layers and short windows first, then deeper (see `docs/training.md`), then longer windows while the learning rate falls to zero.
- Drafter by itself: {_stage(directory / "drafter-alone.pt")}. Cross-entropy, from the target's embedding.
- Drafter towards the target: {_stage(directory / "drafter.pt")}. Hybrid LK loss (overlap of the two distributions,
  arXiv 2602.23881), half on corpus text and half on text written by the target.
- Seed {seed}. Machine: {where.num_cores} cores of {where.processor}, {products} bfloat16 products, no GPU, shared with
  other work. PyTorch {where.versions["torch"]}, tokenizers {where.versions["tokenizers"]}, Python {where.python}.

Made with `pip install --no-deps --target corpus PACKAGES...` and `python -m builtin_pair run --corpus corpus`
(see `docs/training.md`).
"""


def _samples(llm: LLM) -> str:
    parts = ["\n## What it writes (temperature 0)\n"]
    for prompt in SAMPLE_PROMPTS:
        space = llm.target.runtime.context_length - len(llm.target.encode(prompt))
        written = "".join(piece.text for piece in llm.stream(prompt, max_tokens=min(100, space)))
        parts.append(f"```python\n{(prompt + written).rstrip()}\n```\n")
    return "\n".join(parts)
