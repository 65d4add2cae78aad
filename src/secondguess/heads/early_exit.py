"""Early-exit adapter: maps a shallow layer's hidden states to inputs of the target's LM head.

The target itself is not changed, as in Kangaroo (arXiv 2404.18911), which trains an adapter;
LayerSkip (arXiv 2404.16710) trains the model. Without an adapter, the shallow states go through
the target's last norm and LM head directly, which suits models trained for early exit.
"""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.nn import functional

from secondguess.errors import BadInputError, CheckpointError
from secondguess.heads.fields import config_errors, whole_number
from secondguess.heads.files import load_into, read_config, read_tensors
from secondguess.heads.layer import Norm
from secondguess.heads.learning import (
    DepthLosses,
    Objective,
    TrainableHead,
    TrainingBatch,
    masked_loss_and_acceptance,
)
from secondguess.runtime.base import EmbeddingAndHead

KIND = "secondguess-early-exit"


class EarlyExitHead(TrainableHead):
    """Early-exit adapter: a gated feed-forward network with residual connection, and a final norm.

    The final norm replaces the target's before the target's LM head.

    Args:
        exit_layer: number of target layers that run while drafting.
        width: hidden size of the target.
        mlp_size: intermediate size of the feed-forward network.
        norm_eps: epsilon of its norms.

    Raises:
        BadInputError: a number below 1.
    """

    def __init__(self, exit_layer: int, width: int, mlp_size: int, norm_eps: float = 1e-6) -> None:
        super().__init__()
        if min(exit_layer, width, mlp_size) < 1:
            raise BadInputError(
                f"expected an exit behind layer 1 or later and sizes of at least 1, got layer {exit_layer}, width {width}, "
                f"feed-forward {mlp_size}"
            )
        self.exit_layer = exit_layer
        self.hidden_layers = (exit_layer,)
        self.input_norm = Norm(width, norm_eps)
        self.gate_proj = nn.Linear(width, mlp_size, bias=False)
        self.up_proj = nn.Linear(width, mlp_size, bias=False)
        self.down_proj = nn.Linear(mlp_size, width, bias=False)
        self.norm = Norm(width, norm_eps)

    @classmethod
    def fresh(
        cls, embedding_and_head: EmbeddingAndHead, exit_layer: int, mlp_size: int, seed: int
    ) -> EarlyExitHead:
        """Build an untrained adapter, which only normalises the hidden states."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            head = cls(exit_layer, embedding_and_head.width, mlp_size)
        nn.init.zeros_(head.down_proj.weight)
        return head

    def forward(self, states: Tensor) -> Tensor:
        """Map outputs of the exit layer `[..., width]` to inputs of the target's LM head."""
        normed = self.input_norm(states)
        states = states + self.down_proj(functional.silu(self.gate_proj(normed)) * self.up_proj(normed))
        adapted: Tensor = self.norm(states)
        return adapted

    def learn(
        self, training_batch: TrainingBatch, embedding_and_head: EmbeddingAndHead, objective: Objective
    ) -> DepthLosses:
        """Return the loss and acceptance rate of next-token prediction, as one depth.

        The adapter predicts the next token at every draft depth, so there is a single depth to
        train.
        """
        loss, accepted = masked_loss_and_acceptance(
            training_batch.hidden[-1][:, :-1],
            embedding_and_head,
            training_batch.hidden[self.exit_layer][:, :-1],
            lambda states: embedding_and_head.unembed(self(states)),
            training_batch.counts[:, 1:],
            objective,
        )
        return DepthLosses([loss], [accepted])

    def save(self, folder: Path) -> None:
        """Write `config.json` and `model.safetensors`."""
        folder.mkdir(parents=True, exist_ok=True)
        config = {
            "model_type": KIND,
            "exit_layer": self.exit_layer,
            "hidden_size": self.norm.weight.shape[0],
            "intermediate_size": self.up_proj.weight.shape[0],
            "rms_norm_eps": self.norm.eps,
        }
        (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")
        weights = {name: weight.detach().contiguous() for name, weight in self.state_dict().items()}
        save_file(weights, folder / "model.safetensors")

    @classmethod
    def load(cls, folder: Path) -> EarlyExitHead:
        """Read an adapter written by `save`.

        Raises:
            CheckpointError: missing or broken files, or a drafter of another kind.
        """
        config = read_config(folder)
        if config.get("model_type") != KIND:
            raise CheckpointError(
                f"expected an early-exit adapter ({KIND}) in {folder}, got {config.get('model_type')}"
            )
        with config_errors(folder):
            head = cls(
                whole_number(config, "exit_layer"),
                whole_number(config, "hidden_size"),
                whole_number(config, "intermediate_size"),
                float(config["rms_norm_eps"]),
            )
        load_into(head, read_tensors(folder), folder)
        return head
