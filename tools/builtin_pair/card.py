"""Model card of the target, with every number read from the training run."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from builtin_pair.target import TargetTrainer
from secondguess.files import write_atomically
from secondguess.workloads.provenance import collect_provenance

FRONT_MATTER = """---
license: apache-2.0
library_name: transformers
pipeline_tag: text-generation
tags: [code, python, speculative-decoding]
---
"""


def write_target_card(folder: Path, trainer: TargetTrainer, bits_per_byte: float, seed: int) -> None:
    """Write `README.md` next to the target's weights."""
    manifest, summary = (
        json.loads((folder / name).read_text(encoding="utf-8"))
        for name in ("manifest.json", "tokens/summary.json")
    )
    parts = [_head(trainer, bits_per_byte), _data(manifest, summary), _training(trainer, seed)]
    with write_atomically(folder / "target" / "README.md") as stream:
        stream.write((FRONT_MATTER + "\n".join(parts)).encode())


def _head(trainer: TargetTrainer, bits_per_byte: float) -> str:
    config = trainer.model.config
    return f"""
# secondguess built-in target: a small model that completes Python

Llama architecture, {config.num_hidden_layers} layers of width {config.hidden_size}, {config.num_attention_heads} heads
({config.num_key_value_heads} for keys and values), feed-forward width {config.intermediate_size}, tied embeddings,
{config.vocab_size:,} tokens, {sum(weight.numel() for weight in trainer.model.parameters()) / 1e6:.1f} million parameters.
{bits_per_byte:.3f} bits per byte of held-out text.

It exists so that speculative decoding can be tried, tested and measured offline. It writes text that looks like Python;
it does not understand programming, and its code is seldom right. Trained on windows of at most 512 tokens: longer
contexts work, less well.
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
{_screening(manifest["forbidden_prompts"])}

<details><summary>Packages, versions, declared licences, files, MB</summary>

| package | version | licence | files | MB |
|---|---|---|---|---|
{packages}

</details>
"""


def _screening(num_prompts: int) -> str:
    if not num_prompts:
        return "The text was not searched for evaluation prompts."
    return f"No file contains the signature and docstring of any of {num_prompts} evaluation prompts (HumanEval)."


def _training(trainer: TargetTrainer, seed: int) -> str:
    where = collect_provenance(
        num_threads=torch.get_num_threads(), device="cpu", dtype="bfloat16", seed=seed, models={}, runtimes={}
    )
    return f"""
## Training

{trainer.step:,} steps, {trainer.tokens / 1e6:.1f} million tokens, {trainer.seconds / 60:.0f} minutes. Next-token
cross-entropy; Muon for the matrices, AdamW for the rest; longer windows while the learning rate falls to zero. Seed
{seed}. Machine: {where.num_cores} cores of {where.processor}, no GPU. {json.dumps(asdict(where)["versions"])}

Made with `pip install --no-deps --target corpus PACKAGES...` and `python -m builtin_pair run --corpus corpus`
(see `docs/training.md`).
"""
