"""Compare bits per byte of texts under a model in bfloat16 and in 8 bits, over the same windows.

    python benchmarks/quality.py --texts humaneval.jsonl --output int8.json

Texts are JSON objects, one per line; the string fields named by `--fields` are concatenated.
Each text is cut into windows of the given length that overlap by one token, so that all tokens
but a text's first are counted.
"""

import argparse
import json
import math
from pathlib import Path
from statistics import stdev

import torch
from torch.nn import functional

from secondguess.checkpoint.checkpoint import Checkpoint
from secondguess.checkpoint.loaded import LoadedModel
from secondguess.workloads.provenance import collect_provenance

PRECISIONS = {"bfloat16": None, "int8": "int8"}


def bits_of(loaded: LoadedModel, text: str, window: int) -> float:
    """Return the negative log-likelihood of a text in bits, its first token excluded."""
    ids = loaded.encode(text)
    bits = 0.0
    for start in range(0, len(ids) - 1, window - 1):
        tokens = torch.tensor([ids[start : start + window]])
        if tokens.shape[1] > 1:
            logits = loaded.runtime.read(tokens).logits[0, :-1].float()
            bits += float(functional.cross_entropy(logits, tokens[0, 1:], reduction="sum")) / math.log(2)
    return bits


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--texts", type=Path, required=True)
    parser.add_argument("--fields", nargs="+", default=["prompt", "canonical_solution"])
    parser.add_argument("--model", default="builtin")
    parser.add_argument("--window", type=int, default=256)
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    lines = [json.loads(line) for line in options.texts.read_text().splitlines()]
    texts = ["".join(line[field] for field in options.fields) for line in lines]
    num_bytes = sum(len(text.encode()) for text in texts)
    models = {
        name: Checkpoint.resolve(options.model, dtype="bfloat16", device="cpu", quantize=quantize).load()
        for name, quantize in PRECISIONS.items()
    }
    bits = {
        name: [bits_of(loaded, text, options.window) for text in texts] for name, loaded in models.items()
    }
    found = {name: sum(each) / num_bytes for name, each in bits.items()}
    differences = [rounded - exact for exact, rounded in zip(bits["bfloat16"], bits["int8"], strict=True)]
    result = {
        "bits_per_byte": {name: round(value, 5) for name, value in found.items()},
        "int8_over_bfloat16": round(found["int8"] / found["bfloat16"], 5),
        "standard_error_of_the_difference": round(stdev(differences) * len(texts) ** 0.5 / num_bytes, 6),
        "num_texts": len(texts),
        "num_bytes": num_bytes,
    }
    print(json.dumps(result, indent=1))
    if options.output:
        exact = models["bfloat16"]
        provenance = collect_provenance(
            num_threads=torch.get_num_threads(),
            device=exact.device,
            dtype=exact.dtype,
            seed=0,
            models={Path(options.model).name: Path(exact.path)},
            runtimes={name: loaded.runtime_description for name, loaded in models.items()},
        )
        options.output.write_text(json.dumps({"provenance": provenance.as_dict(), **result}, indent=1) + "\n")


if __name__ == "__main__":
    main()
