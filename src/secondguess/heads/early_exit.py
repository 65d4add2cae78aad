"""Early-exit adapter: maps a shallow layer's hidden states to inputs of the target's LM head.

The target itself is not changed, as in Kangaroo (arXiv 2404.18911), which trains an adapter;
LayerSkip (arXiv 2404.16710) trains the model. Without an adapter, the shallow states go through
the target's last norm and LM head directly, which suits models trained for early exit.
"""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional

from secondguess.heads.base import Head, TargetModel
from secondguess.heads.files import config_errors, require_same, write_head
from secondguess.heads.formats import StoredHead
from secondguess.heads.learning import CountedTokens, DepthLosses, Objective, TrainingBatch
from secondguess.runtime.base import EmbeddingAndHead

KIND = "secondguess-early-exit"


class EarlyExitHead(Head):
    """Early-exit adapter: a gated feed-forward network with residual connection, and a final norm.

    The final norm replaces the target's before the target's LM head. `exit_layer` layers of the target
    run while drafting.
    """

    def __init__(self, exit_layer: int, width: int, mlp_size: int, norm_eps: float = 1e-6) -> None:
        super().__init__()
        self.exit_layer = exit_layer
        self.hidden_layers = (exit_layer,)
        self.input_norm = nn.RMSNorm(width, norm_eps)
        self.gate_proj = nn.Linear(width, mlp_size, bias=False)
        self.up_proj = nn.Linear(width, mlp_size, bias=False)
        self.down_proj = nn.Linear(mlp_size, width, bias=False)
        self.norm = nn.RMSNorm(width, norm_eps)

    @classmethod
    def fresh(
        cls, target: TargetModel, seed: int = 0, *, exit_layer: int = 0, mlp_size: int = 0
    ) -> EarlyExitHead:
        """Build an untrained adapter, which only normalises the hidden states.

        By default a quarter of the target's layers run, and the network is twice as wide as its states.
        """
        exit_layer = exit_layer or max(1, target.num_layers // 4)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            head = cls(exit_layer, target.width, mlp_size or 2 * target.width)
        nn.init.zeros_(head.down_proj.weight)
        return head

    @classmethod
    def load(cls, folder: Path, target: TargetModel) -> EarlyExitHead:
        stored = StoredHead(folder, "early-exit")
        with config_errors(folder):
            width = stored.number("hidden_size")
            require_same("width", width, target.width, folder)
            head = cls(
                stored.number("exit_layer"),
                width,
                stored.number("intermediate_size"),
                float(stored.config["rms_norm_eps"]),
            )
        stored.fill(head, stored.read_tensors())
        return head

    def save(self, folder: Path, target: str = "") -> None:
        config = {
            "model_type": KIND,
            "exit_layer": self.exit_layer,
            "hidden_size": self.norm.weight.shape[0],
            "intermediate_size": self.up_proj.weight.shape[0],
            "rms_norm_eps": self.norm.eps,
        }
        write_head(folder, config, self.state_dict())

    def forward(self, states: Tensor) -> Tensor:
        """Map outputs of the exit layer `[..., width]` to inputs of the target's LM head."""
        normed = self.input_norm(states)
        states = states + self.down_proj(functional.silu(self.gate_proj(normed)) * self.up_proj(normed))
        adapted: Tensor = self.norm(states)
        return adapted

    def learn(
        self, training_batch: TrainingBatch, target: EmbeddingAndHead, objective: Objective
    ) -> DepthLosses:
        """Return the loss and acceptance rate of next-token prediction, as one depth.

        The adapter predicts the next token at every draft depth, so there is a single depth to
        train.
        """
        loss, accepted = CountedTokens(training_batch, target).loss_and_acceptance(
            1, training_batch.hidden[self.exit_layer], lambda states: target.unembed(self(states)), objective
        )
        return DepthLosses([loss], [accepted])
