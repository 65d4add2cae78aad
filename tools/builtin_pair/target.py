"""Training of the target: a Llama of Transformers, from random weights, with next-token cross-entropy.

The learning rate warms up, stays constant, and decays linearly to zero over the last part of the budget,
in which windows are longer. The rows of a step depend on the seed and the step alone: with a budget of
steps, a resumed run has the weights of an uninterrupted one, bit by bit.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from builtin_pair.tokens import TokenStore
from secondguess.errors import CheckpointError
from secondguess.files import write_atomically
from secondguess.runtime.system.machine import has_bfloat16
from secondguess.runtime.system.quiet import quiet
from secondguess.train.head_trainer import make_optimizers
from secondguess.train.run_folder import Budget

with quiet():
    from transformers import LlamaConfig, LlamaForCausalLM

Report = Callable[[str], None]
LEARNING_RATE, WARMUP_STEPS, DECAY_SHARE = 0.004, 60, 0.35
WINDOW, LAST_WINDOW, LAST_SHARE = 256, 512, 0.16
"""Tokens per row, those of the last part of the budget, and the size of this part."""
STEP_TOKENS, MICRO_TOKENS = 8192, 4096
"""Tokens of a step, and of the forward passes over which its gradients are accumulated."""
CHECKPOINT_SECONDS = 180.0


@dataclass(frozen=True)
class TargetShape:
    """Shape of the target, with the names of Transformers."""

    num_hidden_layers: int = 16
    hidden_size: int = 256
    num_attention_heads: int = 4
    num_key_value_heads: int = 2
    intermediate_size: int = 768
    vocab_size: int = 6144
    max_position_embeddings: int = 2048


def fresh_target(shape: TargetShape, end_token: int, seed: int) -> Any:
    """Return a Llama with random weights, in which every layer begins as the identity."""
    ends = dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"), end_token)
    config = LlamaConfig(**asdict(shape), **ends, tie_word_embeddings=True, rms_norm_eps=1e-5)
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = LlamaForCausalLM(config)
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.o_proj.weight.zero_()
            layer.mlp.down_proj.weight.zero_()
    return model


def rate_at(share: float, step: int) -> float:
    """Return the factor on the learning rate when a share of the budget is spent."""
    return min(1.0, (step + 1) / WARMUP_STEPS) * min(1.0, (1.0 - share) / DECAY_SHARE)


class TargetTrainer:
    """Training run with its state; `run` continues it to the end of its budget.

    Args:
        model: the Llama to train.
        store: source of token rows.
        budget: minutes, steps or both.
        checkpoint: file of the state; a run found there is continued.
        seed: seed of the order of the text.
        report: callback for progress lines.
        compiled: whether the forward pass is compiled.

    Raises:
        CheckpointError: a checkpoint that is unreadable or of another model.
    """

    def __init__(
        self,
        model: Any,
        store: TokenStore,
        budget: Budget,
        checkpoint: Path,
        *,
        seed: int,
        report: Report,
        compiled: bool = True,
    ) -> None:
        self.model, self.store, self.checkpoint = model, store, checkpoint
        self._budget, self._seed, self._report = budget, seed, report
        self._forward = torch.compile(model) if compiled else model
        self._optimizers = make_optimizers(model, LEARNING_RATE)
        self.step, self.tokens, self.seconds = 0, 0, 0.0
        if checkpoint.is_file():
            self._load()

    @property
    def share(self) -> float:
        """Share of the budget that is spent, 0 to 1."""
        return self._budget.progress(self.seconds, self.step)

    def run(self) -> None:
        """Train until the budget is spent. An interruption leaves the last checkpoint."""
        last_save = time.monotonic()
        while self.share < 1.0:
            begun = time.monotonic()
            loss = self._take_step()
            now = time.monotonic()
            self.seconds += now - begun
            if now - last_save > CHECKPOINT_SECONDS:
                self.save()
                self._report(f"step {self.step}  {self.share:.1%}  loss {loss:.4f}  {self.tokens:,} tokens")
                last_save = time.monotonic()
        self.save()

    def _take_step(self) -> float:
        length = WINDOW if self.share < 1.0 - LAST_SHARE else LAST_WINDOW
        batch = self.store.batch(self._seed, self.step, max(1, STEP_TOKENS // length), length)
        # Rows are distributed in turn, so that every pass has both kinds of text.
        num_passes = max(1, batch[:, 1:].numel() // MICRO_TOKENS)
        total = 0.0
        for index in range(num_passes):
            loss = self._loss(batch[index::num_passes].contiguous()) / num_passes
            loss.backward()  # type: ignore[no-untyped-call]
            total += float(loss.detach())
        for optimizer in self._optimizers:
            for group in optimizer.param_groups:
                group["lr"] = LEARNING_RATE * rate_at(self.share, self.step)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        self.step += 1
        self.tokens += batch[:, 1:].numel()
        return total

    def _loss(self, rows: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16, enabled=has_bfloat16(torch.device("cpu"))):
            logits = self._forward(input_ids=rows[:, :-1], use_cache=False).logits
        return functional.cross_entropy(logits.flatten(0, 1).float(), rows[:, 1:].flatten())

    def save(self) -> None:
        """Write the whole state; the previous checkpoint is kept until the new one is complete."""
        content = {
            "weights": self.model.state_dict(),
            "optimizers": [optimizer.state_dict() for optimizer in self._optimizers],
            "standing": [self.step, self.tokens, self.seconds],
        }
        self.checkpoint.parent.mkdir(parents=True, exist_ok=True)
        with write_atomically(self.checkpoint) as stream:
            torch.save(content, stream)

    def _load(self) -> None:
        try:
            content = torch.load(self.checkpoint, map_location="cpu", weights_only=True)
            self.model.load_state_dict(content["weights"])
            for optimizer, state in zip(self._optimizers, content["optimizers"], strict=True):
                optimizer.load_state_dict(state)
            self.step, self.tokens, self.seconds = content["standing"]
        except Exception as error:
            reason = (str(error).splitlines() or [type(error).__name__])[0]
            raise CheckpointError(
                f"expected a checkpoint of this model in {self.checkpoint}, got: {reason}; "
                "train in a new folder, or delete the file"
            ) from error
        self._report(f"resuming at step {self.step}, {self.share:.1%} of the budget spent")


@torch.no_grad()
def bits_per_byte(model: Any, store: TokenStore, rows: int = 256, length: int = 512) -> float:
    """Return held-out cross-entropy in bits per byte of text, over evenly spaced windows."""
    batch = store.held_out_batch(rows, length)
    total = 0.0
    for part in torch.split(batch, 8):
        logits = model(input_ids=part[:, :-1], use_cache=False).logits.float()
        total += float(functional.cross_entropy(logits.flatten(0, 1), part[:, 1:].flatten(), reduction="sum"))
    return total / batch[:, 1:].numel() / math.log(2) / store.bytes_per_token
