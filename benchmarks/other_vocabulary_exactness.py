"""Certify drafts of a model with another tokenizer, compared with the same drafts in Transformers.

    python benchmarks/other_vocabulary_exactness.py --output exactness.json

Target and draft model are random and share a part of their few tokens. Texts of three tokens are
sampled and compared with the target's exact distribution: with `vocab=intersection` and `vocab=string`
by the certificate of `secondguess verify`, and with `generate` of Transformers, plain and with
`assistant_tokenizer` (which samples drafts over shared tokens, as `intersection` does). `distance` is the
total variation distance between observed frequencies and the target's distribution; that of exact
sampling is `expected` on average.
"""

from __future__ import annotations

import itertools
import math
import tempfile
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from common import make_parser, store
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    AutoTokenizer,
    GenerationConfig,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
)

from secondguess.api import load
from secondguess.proof.certificate import CertifyOptions, certify, plain_logits_of, system_of
from secondguess.runtime.quiet import no_progress_bars, quiet

TOKENS = {"target": ["a", "b", "c", "ab", "Ġ"], "draft": ["Ġ", "c", "b", "a", "bc", "d"]}
NUM_TOKENS = 3
PROMPT = (0,)


def write_model(folder: Path, name: str, seed: int) -> None:
    """Write a random model whose tokens are letters and pairs of letters."""
    tokens = TOKENS[name]
    pairs = [(token[0], token[1]) for token in tokens if len(token) == 2]
    tokenizer = Tokenizer(models.BPE({token: index for index, token in enumerate(tokens)}, pairs))
    tokenizer.pre_tokenizer, tokenizer.decoder = (
        pre_tokenizers.ByteLevel(add_prefix_space=False),
        decoders.ByteLevel(),
    )
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=len(tokens),
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=2,
        max_position_embeddings=64,
        initializer_range=0.5,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=None,
    )
    LlamaForCausalLM(config).save_pretrained(folder / name)
    PreTrainedTokenizerFast(tokenizer_object=tokenizer).save_pretrained(folder / name)


def of_transformers(folder: Path, num_samples: int) -> Mapping[str, float]:
    """Return the distances of texts by `generate`, plain and with a draft model with another tokenizer."""
    with no_progress_bars():
        target, draft = (
            LlamaForCausalLM.from_pretrained(folder / name).double().eval() for name in ("target", "draft")
        )
    draft.generation_config.num_assistant_tokens = 2
    draft.generation_config.num_assistant_tokens_schedule = "constant"
    draft.generation_config.assistant_confidence_threshold = 0.0
    assisted = {
        "assistant_model": draft,
        "tokenizer": AutoTokenizer.from_pretrained(folder / "target"),
        "assistant_tokenizer": AutoTokenizer.from_pretrained(folder / "draft"),
    }
    sampling = GenerationConfig(do_sample=True, top_k=0, max_new_tokens=NUM_TOKENS, pad_token_id=0)
    prompt, logits_of = torch.tensor([PROMPT]), plain_logits_of(target)
    exact = {}
    for text in itertools.product(range(len(TOKENS["target"])), repeat=NUM_TOKENS):
        dists = [logits_of((*PROMPT, *text[:place])).softmax(-1) for place in range(NUM_TOKENS)]
        exact[text] = math.prod(float(dist[token]) for dist, token in zip(dists, text, strict=True))
    found = {
        "expected": sum(math.sqrt(p * (1 - p) * 2 / (math.pi * num_samples)) for p in exact.values()) / 2
    }
    for name, options in {"plain": {}, "assistant_tokenizer": assisted}.items():
        counts: Counter[Any] = Counter()
        with quiet(), torch.inference_mode():
            for seed in range(num_samples):
                torch.manual_seed(seed)
                output = target.generate(
                    prompt, attention_mask=torch.ones_like(prompt), generation_config=sampling, **options
                )
                counts[tuple(output[0, len(PROMPT) :].tolist())] += 1
        found[name] = sum(abs(counts[text] / num_samples - chance) for text, chance in exact.items()) / 2
    return found


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--num-samples", type=int, default=400_000)
    parser.add_argument("--num-transformers", type=int, default=2000, help="texts sampled with Transformers")
    options = parser.parse_args()
    report: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as path:
        folder = Path(path)
        for seed, name in enumerate(TOKENS, 1):
            write_model(folder, name, seed)
        for method in ("intersection", "string"):
            drafter = f"model:{folder / 'draft'},vocab={method}"
            llm = load(folder / "target", drafter, dtype="float32", controller="fixed:2")
            certified = certify(
                system_of(llm, PROMPT),
                CertifyOptions(num_samples=options.num_samples, num_tokens=NUM_TOKENS, num_cells=200),
            )
            report[method] = certified.as_dict() | {"model": "random", "drafter": f"random, vocab={method}"}
            print(f"{method}: distance {certified.distance:.4f}, bound {certified.bound:.4f}", flush=True)
        report["transformers"] = of_transformers(folder, options.num_transformers)
        print("Transformers:", report["transformers"])
    store(options, report, num_threads=torch.get_num_threads(), dtype="float32")


if __name__ == "__main__":
    main()
