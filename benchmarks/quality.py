"""Compare a model in bfloat16, in 8 bits and in 4 bits over the same windows of texts.

    python benchmarks/quality.py --texts humaneval.jsonl --output quality.json

Reports bits per byte, how often the most probable token is that of bfloat16, and the mean
divergence (KL, in bits) of the next token's distribution from that of bfloat16.

Texts are JSON objects, one per line; the string fields named by `--fields` are concatenated.
Each text is cut into windows of the given length that overlap by one token, so that all tokens
but a text's first are counted.
"""

import json
import math
from pathlib import Path
from statistics import stdev

import torch
from common import make_parser, store
from torch import Tensor
from torch.nn import functional

from secondguess.checkpoint.loaded import LoadedModel
from secondguess.checkpoint.plan import Checkpoint

PRECISIONS = {"bfloat16": None, "int8": "int8", "int4": "int4"}


def windows(loaded: LoadedModel, text: str, length: int) -> list[Tensor]:
    """Return the token ids `[1, token]` of a text's windows, of at least two tokens each."""
    ids = loaded.encode(text)
    return [torch.tensor([ids[start : start + length]]) for start in range(0, len(ids) - 1, length - 1)]


def measure(models: dict[str, LoadedModel], text: str, length: int) -> dict[str, Tensor]:
    """Return per precision the sums over a text's predicted tokens.

    These are the negative log-likelihood, the number of tokens at which the most probable one is
    that of bfloat16, the divergence from bfloat16, and the number of tokens.
    """
    sums = {name: torch.zeros(4, dtype=torch.float64) for name in models}
    for tokens in windows(models["bfloat16"], text, length):
        logits = {name: each.runtime.probe(tokens).logits[0, :-1] for name, each in models.items()}
        exact = logits["bfloat16"].double().log_softmax(-1)
        for name, found in logits.items():
            logs = found.double().log_softmax(-1)
            bits = functional.nll_loss(logs, tokens[0, 1:], reduction="sum") / math.log(2)
            agreed = (logs.argmax(-1) == exact.argmax(-1)).sum()
            divergence = (exact.exp() * (exact - logs)).sum() / math.log(2)
            sums[name] += torch.stack([bits, agreed.double(), divergence, logs.new_tensor(len(logs))])
    return sums


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--texts", type=Path, required=True)
    parser.add_argument("--fields", nargs="+", default=["prompt", "canonical_solution"])
    parser.add_argument("--model", default="builtin")
    parser.add_argument("--window", type=int, default=256)
    options = parser.parse_args()
    lines = [json.loads(line) for line in options.texts.read_text().splitlines()]
    texts = ["".join(line[field] for field in options.fields) for line in lines]
    num_bytes = sum(len(text.encode()) for text in texts)
    models = {
        name: Checkpoint.resolve(options.model, dtype="bfloat16", device="cpu", quantize=quantize).load()
        for name, quantize in PRECISIONS.items()
    }
    sums = [measure(models, text, options.window) for text in texts]
    result: dict[str, object] = {"num_texts": len(texts), "num_bytes": num_bytes}
    for name in PRECISIONS:
        bits, agreed, divergence, num_tokens = sum(each[name] for each in sums).tolist()
        differences = [float(each[name][0] - each["bfloat16"][0]) for each in sums]
        result[name] = {
            "bits_per_byte": round(bits / num_bytes, 5),
            "over_bfloat16": round(bits / sum(float(each["bfloat16"][0]) for each in sums), 5),
            "standard_error_of_the_difference": round(stdev(differences) * len(texts) ** 0.5 / num_bytes, 6),
            "top_1_agreement": round(agreed / num_tokens, 5),
            "divergence_in_bits": round(divergence / num_tokens, 5),
        }
    print(json.dumps(result, indent=1))
    exact = models["bfloat16"]
    store(
        options,
        result,
        num_threads=torch.get_num_threads(),
        dtype=exact.dtype,
        models={Path(options.model).name: Path(exact.path)},
        runtimes={name: loaded.runtime_description for name, loaded in models.items()},
    )


if __name__ == "__main__":
    main()
