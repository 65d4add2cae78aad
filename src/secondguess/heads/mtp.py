"""Multi-token prediction (MTP) module (DeepSeek-V3, arXiv 2412.19437, section 2.2).

A drafter head, trained with the target or after it, that reads the target's last hidden state.
One module drafts any number of tokens: after its own draft tokens it reads its own outputs. The
modules of Qwen and MiMo have the same form.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from secondguess.errors import BadInputError
from secondguess.heads.layer import AttentionFunction, CosSin, DecoderLayer, LayerConfig, Norm
from secondguess.heads.unrolled import DEFAULT_STEPS, UnrolledHead, default_layer_config, initialise
from secondguess.runtime.base import EmbeddingAndHead, HiddenStates


class MtpHead(UnrolledHead):
    """MTP module: `layer(eh_proj([enorm(embedding); hnorm(state)]))`, a norm and an LM head.

    Args:
        layer: shape of its decoder layer.
        embedding_and_head: embeddings and LM head of the target.
        vocab_size: vocabulary size of the target.
        num_layers_of_target: number of target layers; in a checkpoint, the module's layer index
            follows them.
        has_embeddings, has_head: whether it has its own embeddings and LM head; if not, it uses
            the target's.
        norm_output: whether later draft steps read the output after the last norm, not before it.
        num_steps: number of draft steps in training.

    Raises:
        BadInputError: another hidden size than the target's.
    """

    def __init__(
        self,
        layer: LayerConfig,
        embedding_and_head: EmbeddingAndHead,
        vocab_size: int,
        num_layers_of_target: int,
        *,
        has_embeddings: bool = False,
        has_head: bool = False,
        norm_output: bool = False,
        num_steps: int = DEFAULT_STEPS,
    ) -> None:
        super().__init__()
        width = layer.width
        if width != embedding_and_head.width:
            raise BadInputError(
                f"expected a module for states of width {embedding_and_head.width}, the target's, got one for {width}"
            )
        self.shape, self.num_layers = layer, 1
        self.hidden_layers, self.num_steps, self.vocab_size = (-1,), num_steps, vocab_size
        self.num_layers_of_target, self.norm_output = num_layers_of_target, norm_output
        self.words = None
        self.enorm = Norm(width, layer.norm_eps)
        self.hnorm = Norm(width, layer.norm_eps)
        self.eh_proj = nn.Linear(2 * width, width, bias=False)
        self.layer = DecoderLayer(layer)
        self.norm = Norm(width, layer.norm_eps)
        if has_embeddings:
            self.embed_tokens = nn.Embedding(vocab_size, width)
        if has_head:
            self.head = nn.Linear(width, vocab_size, bias=False)
        self._has_embeddings, self._has_head = has_embeddings, has_head
        self._embedding_and_head = embedding_and_head

    @classmethod
    def fresh(
        cls,
        embedding_and_head: EmbeddingAndHead,
        vocab_size: int,
        num_layers_of_target: int,
        seed: int,
        *,
        layer: LayerConfig | None = None,
        num_steps: int = DEFAULT_STEPS,
    ) -> MtpHead:
        """Build an untrained module.

        Args:
            embedding_and_head, vocab_size, num_layers_of_target, num_steps: as in the constructor.
            seed: seed of the weights.
            layer: shape of its decoder layer; None for the default of the target's hidden size.
        """
        shape = layer or default_layer_config(embedding_and_head.width)
        head = cls(shape, embedding_and_head, vocab_size, num_layers_of_target, num_steps=num_steps)
        initialise(head, seed)
        return head

    def features(self, hidden: HiddenStates) -> Tensor:
        return hidden[-1]

    def forward(
        self, embedded: Tensor, features: Tensor, cos_sin: CosSin, attend: AttentionFunction
    ) -> Tensor:
        both = torch.cat((self.enorm(embedded), self.hnorm(features)), -1)
        state: Tensor = self.layer(self.eh_proj(both), cos_sin, attend)
        return self.norm(state) if self.norm_output else state

    def draft_logits(self, output: Tensor) -> Tensor:
        normed = output if self.norm_output else self.norm(output)
        logits: Tensor = (
            self.head(normed)
            if self._has_head
            else self._embedding_and_head.unembed(normed.to(self._embedding_and_head.dtype))
        )
        return logits

    def embed(self, tokens: Tensor) -> Tensor:
        embedded: Tensor = (
            self.embed_tokens(tokens) if self._has_embeddings else self._embedding_and_head.embed(tokens)
        )
        return embedded
