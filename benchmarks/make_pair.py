"""Make a target of any public shape and a drafter for it, without downloading anything.

    python benchmarks/make_pair.py pairs/88m --shape 88m --agreement 0.75
    python benchmarks/make_pair.py pairs/1b --config config.json --agreement 0.75
    python benchmarks/make_pair.py pairs/grown-1b --grow builtin --shape llama-3.2-1b

The compute cost is that of the real shape, and every engine can load the same weights. There are
two kinds of pairs:

- Calibrated: a random target. The drafter consists of its first layers with its norm and head; the
  outputs of its later layers are damped until both models have the same greedy token as often as
  requested. The texts are meaningless, with a tokenizer of one word per token (`t0 t1 ...`).
- Grown (`--grow`): a trained pair, widened and deepened to the cost of the shape (growth.py). Texts and
  acceptance are those of the small models; the vocabulary stays small, and the layers are at least as many as
  those of the small target.

Output: `target` and `drafter`, two Transformers checkpoints; for a calibrated pair also `pair.json` with the
agreement measured on random text.
"""

import argparse
import copy
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from common import make_parser
from growth import GrownShape, grow
from tokenizers import Tokenizer, models, pre_tokenizers
from torch import Tensor
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

import secondguess.builtin

SHAPES = {
    "88m": {
        "vocab_size": 8192,
        "hidden_size": 768,
        "intermediate_size": 2048,
        "num_hidden_layers": 12,
        "num_attention_heads": 12,
        "num_key_value_heads": 4,
        "max_position_embeddings": 2048,
        "tie_word_embeddings": False,
    },
    "llama-3.2-1b": {
        "vocab_size": 128256,
        "hidden_size": 2048,
        "intermediate_size": 8192,
        "num_hidden_layers": 16,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 64,
        "max_position_embeddings": 4096,
        "tie_word_embeddings": True,
    },
}
GROWN_SHAPES = {
    "88m": (GrownShape(768, 1536, 16, 12, 4), GrownShape(768, 2048, 1, 12, 4)),
    "llama-3.2-1b": (GrownShape(2048, 8192, 20, 32, 8), GrownShape(2048, 8192, 1, 32, 8)),
}
"""Shapes of the grown built-in target and draft model.

The 1B shape has four layers more than Llama 3.2 1B, which replace the weights of its larger
vocabulary: a token reads as many bytes.
"""

NUM_TEXTS, TEXT_LENGTH, UNREAD = 16, 64, 16
"""Random texts on which agreement is measured, and their first positions, which are skipped.

To a random model, random text is as good as its own. 768 positions give a standard error of 0.016.
"""

TABLE_SIZE = 0.2
"""Norm of a row of the embedding and of the head.

Small, since a model with tied embeddings would otherwise repeat its input.
"""

SEARCH_STEPS = 7


@dataclass(frozen=True)
class Agreement:
    """Agreement of two models.

    Args:
        greedy: share of positions at which both have the same greedy token.
        overlap: mean of the sum over tokens of min(p, q), which is the share of draft tokens that
            token-level rejection accepts at temperature 1.
        certainty: mean probability of the target's most likely token.
    """

    greedy: float
    overlap: float
    certainty: float


def random_target(config: LlamaConfig, sharpness: float, device: str = "cpu") -> Any:
    """Return a Llama with equally contributing layers and logits of deviation `sharpness`."""
    with torch.device("meta"):
        model = LlamaForCausalLM(config)
    model = model.to(torch.bfloat16).to_empty(device=device)
    # `to_empty` left its buffers unset
    model.model.rotary_emb = type(model.model.rotary_emb)(config).to(device)
    for name, weight in model.named_parameters():
        if name == "model.norm.weight":
            weight.data.fill_(sharpness / TABLE_SIZE)
        elif weight.dim() == 1:
            weight.data.fill_(1.0)
        elif name.endswith(("lm_head.weight", "embed_tokens.weight")):
            weight.data.normal_(std=TABLE_SIZE * weight.shape[1] ** -0.5)
        else:
            weight.data.normal_(std=weight.shape[1] ** -0.5)
    model.tie_weights()
    return model.eval()


def first_layers(target: Any, num_layers: int) -> Any:
    """Return a model of the target's first layers that shares its weights."""
    config = copy.deepcopy(target.config)
    config.num_hidden_layers = num_layers
    with torch.device("meta"):
        drafter = LlamaForCausalLM(config)
    drafter.model.embed_tokens = target.model.embed_tokens
    drafter.model.layers = target.model.layers[:num_layers]
    drafter.model.norm = target.model.norm
    drafter.model.rotary_emb = target.model.rotary_emb
    drafter.lm_head = target.lm_head
    return drafter.eval()


def dists(model: Any, tokens: Tensor) -> Tensor:
    """Return next-token probabilities `[text, position, vocab]` from position `UNREAD` on."""
    # Copied: over a strided view torch's bfloat16 product is a hundred times slower.
    states = model.model(tokens, use_cache=False).last_hidden_state[:, UNREAD:].contiguous()
    return model.lm_head(states).float().softmax(-1)


def measure(target: Any, drafter: Any, tokens: Tensor) -> Agreement:
    compute_target_probs, compute_draft_probs = dists(target, tokens), dists(drafter, tokens)
    return Agreement(
        float((compute_target_probs.argmax(-1) == compute_draft_probs.argmax(-1)).float().mean()),
        float(torch.minimum(compute_target_probs, compute_draft_probs).sum(-1).mean()),
        float(compute_target_probs.amax(-1).mean()),
    )


def damp_until(target: Any, drafter: Any, num_kept: int, agreement: float) -> tuple[float, Agreement]:
    """Damp the outputs of layers after the first `num_kept`, the drafter's, until `agreement` is about reached.

    Agreement grows almost monotonically as the factor shrinks; the best factor that bisection
    tries is used.

    Returns:
        The factor, which stays applied to the target, and the agreement measured with it.
    """
    tokens = torch.randint(target.config.vocab_size, (NUM_TEXTS, TEXT_LENGTH), device=target.device)
    low, high, current = 1e-3, 1.0, 1.0
    tried: dict[float, Agreement] = {}
    for _ in range(SEARCH_STEPS):
        middle = (low * high) ** 0.5
        _damp(target, num_kept, middle / current)
        current = middle
        tried[middle] = measure(target, drafter, tokens)
        print(f"damping {middle:.4f}: agreement {tried[middle].greedy:.3f}", flush=True)
        low, high = (middle, high) if tried[middle].greedy > agreement else (low, middle)
    best = min(tried, key=lambda factor: abs(tried[factor].greedy - agreement))
    _damp(target, num_kept, best / current)
    return best, measure(target, drafter, tokens)  # repeated scaling has rounded the weights


def _damp(target: Any, num_kept: int, factor: float) -> None:
    """Scale what the later layers add to the residual stream."""
    for layer in target.model.layers[num_kept:]:
        for name, module in layer.named_modules():
            if name.endswith(("o_proj", "out_proj", "down_proj")):
                module.weight.data.mul_(factor)


def word_tokenizer(vocab_size: int) -> PreTrainedTokenizerFast:
    """Return a tokenizer of one word per token, so that any sequence of ids is a text."""
    words = Tokenizer(models.WordLevel({f"t{token}": token for token in range(vocab_size)}, unk_token="t0"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=words)


def make_pair(
    out: Path, config: LlamaConfig, num_kept: int, agreement: float, sharpness: float, seed: int
) -> None:
    torch.manual_seed(seed)
    with torch.inference_mode():
        target = random_target(config, sharpness)
        drafter = first_layers(target, num_kept)
        damping, found = damp_until(target, drafter, num_kept, agreement)
    tokenizer = word_tokenizer(config.vocab_size)
    for name, model in {"target": target, "drafter": drafter}.items():
        model.save_pretrained(out / name)
        tokenizer.save_pretrained(out / name)
    about = {"drafter_layers": num_kept, "asked": agreement, "damping": damping, "sharpness": sharpness}
    (out / "pair.json").write_text(json.dumps(about | {"seed": seed} | asdict(found), indent=1) + "\n")
    print(
        f"{out}: agreement {found.greedy:.3f}, overlap {found.overlap:.3f}, certainty {found.certainty:.3f}"
    )


def grow_pair(out: Path, small: Path | None, shape: str) -> None:
    """Write a grown pair.

    Args:
        small: directory of `target` and `drafter`; None for the built-in ones.
    """
    folder = Path(secondguess.builtin.__file__).parent if small is None else small
    for name, grown_shape in zip(("target", "drafter"), GROWN_SHAPES[shape], strict=True):
        path = folder / name
        model = grow(LlamaForCausalLM.from_pretrained(path, dtype="auto"), grown_shape)
        model.save_pretrained(out / name)
        AutoTokenizer.from_pretrained(path).save_pretrained(out / name)
        print(f"{out / name}: {model.num_parameters() / 1e6:.0f} million parameters")


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = make_parser(__doc__, output=False)
    parser.add_argument("out", type=Path, help="directory to write to")
    shape = parser.add_mutually_exclusive_group()
    shape.add_argument("--shape", choices=sorted(SHAPES | GROWN_SHAPES), default="88m")
    parser.add_argument("--grow", help="builtin, or the directory of a trained pair of Llama models")
    shape.add_argument("--config", type=Path, help="config.json of a Llama model, for any other shape")
    parser.add_argument("--drafter-layers", type=int, default=2)
    parser.add_argument("--agreement", type=float, default=0.75, help="share of equal greedy tokens")
    parser.add_argument("--sharpness", type=float, default=6.0, help="standard deviation of the logits")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args(arguments)
    if options.grow and options.config:
        parser.error("expected --grow with --shape, got --config")
    if not options.grow and options.shape not in SHAPES:
        parser.error(f"expected --grow with --shape {options.shape}, got none")
    if not 0 < options.agreement < 1:
        parser.error(f"expected --agreement between 0 and 1, got {options.agreement}")
    return options


def main() -> None:
    options = parse()
    if options.grow:
        grow_pair(options.out, None if options.grow == "builtin" else Path(options.grow), options.shape)
        return
    entries = json.loads(options.config.read_text()) if options.config else SHAPES[options.shape]
    config = LlamaConfig(**{**entries, "bos_token_id": None, "eos_token_id": None, "dtype": "bfloat16"})
    if not 0 < options.drafter_layers < config.num_hidden_layers:
        raise SystemExit(
            f"expected --drafter-layers between 1 and {config.num_hidden_layers - 1}, got {options.drafter_layers}"
        )
    make_pair(options.out, config, options.drafter_layers, options.agreement, options.sharpness, options.seed)


if __name__ == "__main__":
    main()
