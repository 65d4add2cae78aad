"""Measure recurrent targets in bfloat16: the cost of verification, and a hybrid with a calibrated drafter.

    python benchmarks/recurrent.py --output recurrent.json

- The cost v(m) of a pass over m tokens relative to one over a single token, for random models of 8
  layers of width 768, three recurrent ones for each attention layer: gated delta rule, Mamba-2 and
  short convolutions. Each runs with the kernels and with the functions of Transformers and torch
  alone; all widths and both ways take turns.
- The speed of a hybrid of 24 such layers with a drafter of its first layer, compared with plain decoding.
  The later layers are damped until both have the same greedy token as often as requested, as in
  make_pair.py. Attention layers and a few others round by the width of a pass (docs/runtimes.md), so
  in bfloat16 some greedy texts may differ; how many are equal is part of the result.
"""

from __future__ import annotations

import copy
import json
import random
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict
from pathlib import Path
from statistics import median
from typing import Any
from unittest.mock import patch

import torch
import transformers
from common import make_parser, store
from four_bits import count_equal_texts, decode_all, figures
from make_pair import TABLE_SIZE, damp_until, word_tokenizer
from torch import nn

from secondguess.bench.systems import Models, SecondguessSystem
from secondguess.core import Draft, Row
from secondguess.runtime import scans
from secondguess.runtime.packing import pack_linears
from secondguess.runtime.recurrent import RecurrentRuntime
from secondguess.sampling import SamplingParams

Json = dict[str, Any]
WIDTHS = (1, 2, 3, 5, 9)
CONTEXT = 128
SHARPNESS = 6.0
"""Standard deviation of the logits of the hybrid."""
SHAPE = {
    "vocab_size": 8192,
    "hidden_size": 768,
    "intermediate_size": 2048,
    "num_attention_heads": 12,
    "num_key_value_heads": 4,
    "max_position_embeddings": 2048,
    "tie_word_embeddings": False,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}


def delta_rule_config(num_layers: int) -> Any:
    """Return a dense Qwen3.5: 16 heads of 128 numbers, two for each head of the keys."""
    return transformers.Qwen3_5TextConfig(
        **SHAPE,
        num_hidden_layers=num_layers,
        head_dim=64,
        linear_num_key_heads=8,
        linear_num_value_heads=16,
        linear_key_head_dim=128,
        linear_value_head_dim=128,
        layer_types=_layers(num_layers, "linear_attention", "full_attention"),
    )


def mamba2_config(num_layers: int) -> Any:
    """Return a Granite 4 hybrid without experts: 24 heads of 64 numbers with 128 states each."""
    return transformers.GraniteMoeHybridConfig(
        **SHAPE,
        num_hidden_layers=num_layers,
        num_local_experts=0,
        shared_intermediate_size=2048,
        mamba_n_heads=24,
        mamba_d_head=64,
        mamba_d_state=128,
        mamba_n_groups=1,
        layers_block_type=_layers(num_layers, "mamba", "attention"),
    )


def convolution_config(num_layers: int) -> Any:
    """Return an LFM2."""
    return transformers.Lfm2Config(
        **SHAPE,
        num_hidden_layers=num_layers,
        block_auto_adjust_ff_dim=False,
        layer_types=_layers(num_layers, "conv", "full_attention"),
    )


def _layers(num_layers: int, recurrent: str, attention: str) -> list[str]:
    return [attention if index % 4 == 3 else recurrent for index in range(num_layers)]


KINDS = {
    "gated delta rule": delta_rule_config,
    "mamba-2": mamba2_config,
    "short convolution": convolution_config,
}


@contextmanager
def without_our_functions() -> Iterator[None]:
    """Run the scans and convolutions of a pass as the modules' own functions do."""

    def call_original(self: scans.Convolution, *inputs: Any, **options: Any) -> Any:
        return self.original(*inputs, **options)

    with ExitStack() as patches:
        patches.enter_context(patch.object(scans, "can_run", lambda _: False))
        patches.enter_context(patch.object(scans.Convolution, "__call__", call_original))
        yield


def random_model(config: Any) -> Any:
    return transformers.AutoModelForCausalLM.from_config(config).to(torch.bfloat16).eval()


class TimedPasses:
    """Rounds of one runtime over one row, timed by the number of tokens of their pass."""

    def __init__(self, model: Any) -> None:
        self.runtime = RecurrentRuntime(model)
        self.seconds: dict[int, list[float]] = defaultdict(list)
        self._row = Row(
            torch.randint(SHAPE["vocab_size"], (CONTEXT,)).tolist(), SamplingParams(max_tokens=64)
        )
        self.runtime.begin([self._row])

    def run(self, width: int) -> None:
        """Time a pass over pending and drafts, and what keeping the first half of the drafts takes."""
        row, runtime = self._row, self.runtime
        drafts = row.tokens[: width - 1]
        accepted = drafts[: (width - 1) // 2]
        start = time.perf_counter()
        runtime.score([row], Draft.chains([drafts]))
        runtime.keep([row], [list(range(len(accepted)))])
        state = runtime.slots[row]
        runtime.cache.states_at(state.slot, state.length)  # else computed in the next round
        self.seconds[width].append(time.perf_counter() - start)
        row.tokens += [*accepted, row.tokens[width]]


def verification_costs(num_turns: int) -> Json:
    """Return the milliseconds of passes and their ratios, by kind of layer."""
    report: Json = {}
    for name, make_config in KINDS.items():
        torch.manual_seed(0)
        model = random_model(make_config(8))
        with without_our_functions():
            plain = TimedPasses(copy.deepcopy(model))
        if not pack_linears(model):
            raise SystemExit(
                f"expected the kernels to run the linear layers of {name}, got a model that they change"
            )
        ours = TimedPasses(model)
        for _ in range(num_turns):
            for width in WIDTHS:
                ours.run(width)
                ours.run(width)
                with without_our_functions():
                    plain.run(width)
        report[name] = {"kernels": _summary(ours), "torch": _summary(plain)}
        print(name, json.dumps(report[name]), flush=True)
    return report


def _summary(passes: TimedPasses) -> Json:
    # the first ones of each width allocate
    medians = {width: median(seconds[1:]) for width, seconds in passes.seconds.items()}
    return {
        "milliseconds": {width: round(1000 * each, 2) for width, each in medians.items()},
        "v": {width: round(each / medians[1], 3) for width, each in medians.items()},
    }


def make_pair(folder: Path, num_layers: int, agreement: float) -> None:
    """Write a random hybrid, a drafter of its first layer, and the agreement of the two."""
    torch.manual_seed(0)
    target = transformers.AutoModelForCausalLM.from_config(delta_rule_config(num_layers)).eval()
    with torch.inference_mode():
        for module in target.modules():
            if isinstance(module, nn.Linear):
                module.weight.normal_(std=module.weight.shape[1] ** -0.5)
        for table in (target.lm_head, target.model.embed_tokens):
            table.weight.normal_(std=TABLE_SIZE * table.weight.shape[1] ** -0.5)
        target.model.norm.weight.fill_(SHARPNESS / TABLE_SIZE - 1)  # the module adds 1
        drafter = _first_layer(target)
        _, found = damp_until(target, drafter, 1, agreement)
    tokenizer = word_tokenizer(SHAPE["vocab_size"])
    for name, model in {"target": target, "drafter": drafter}.items():
        model.to(torch.bfloat16).save_pretrained(folder / name)
        tokenizer.save_pretrained(folder / name)
    (folder / "pair.json").write_text(json.dumps(asdict(found), indent=1) + "\n")


def _first_layer(target: Any) -> Any:
    config = copy.deepcopy(target.config)
    config.num_hidden_layers, config.layer_types = 1, config.layer_types[:1]
    drafter = transformers.AutoModelForCausalLM.from_config(config).eval()
    drafter.load_state_dict(target.state_dict(), strict=False)
    return drafter


def speeds_of_pair(folder: Path, num_prompts: int, num_tokens: int) -> Json:
    """Return the speed of plain decoding and of the drafter with two controllers."""
    models = Models(str(folder / "target"), "bfloat16", "cpu")
    drafter = f"model:{folder / 'drafter'}"
    systems = {
        "bfloat16 plain": ("bfloat16", SecondguessSystem(models, "none", None)),
        "bfloat16 drafter": ("bfloat16", SecondguessSystem(models, drafter, None)),
        "bfloat16 drafter, 4 drafts": ("bfloat16", SecondguessSystem(models, drafter, "fixed:4")),
    }
    prompts = torch.randint(SHAPE["vocab_size"], (num_prompts, CONTEXT)).tolist()
    rng = random.Random(0)
    greedy, sampled = (
        decode_all(systems, prompts, num_tokens, temperature, rng) for temperature in (0.0, 1.0)
    )
    return {
        "equal_texts": count_equal_texts(greedy),
        "temperature 0": figures(greedy),
        "temperature 1": figures(sampled),
    }


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--turns", type=int, default=12)
    parser.add_argument("--pair", type=Path, help="folder of the pair, which is written if it does not exist")
    parser.add_argument("--agreement", type=float, default=0.75)
    parser.add_argument("--prompts", type=int, default=6)
    parser.add_argument("--tokens", type=int, default=64)
    options = parser.parse_args()
    report: Json = {"verification": verification_costs(options.turns)}
    if options.pair is not None:
        if not options.pair.exists():
            make_pair(options.pair, 24, options.agreement)
        report["agreement"] = json.loads((options.pair / "pair.json").read_text())
        report["pair"] = speeds_of_pair(options.pair, options.prompts, options.tokens)
    print(json.dumps(report, indent=1))
    store(options, report, num_threads=torch.get_num_threads(), dtype="bfloat16")


if __name__ == "__main__":
    main()
