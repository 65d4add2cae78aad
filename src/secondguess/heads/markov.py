"""Heads that make the logits of a block depend on the tokens drafted before: low-rank biases, by kind.

The logits of a position are those of the backbone plus a matrix times a *latent* `[rank]`, which
depends on the token before the position (`vanilla`), on the backbone's state too (`gated`, and the
`selector` of DFlash2), or on all earlier positions of the block (`rnn`, the `refiner` of xPress, and
the `gru` of Domino).
Names of parts are those in published checkpoints.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional


class BlockBias(nn.Module):
    """Base class of the heads that correct the logits of a block by the tokens before each position."""

    precedes_anchor = False
    """True if the token before the position of the pending token is the text's; else that is the pending token itself."""

    @property
    @abstractmethod
    def output(self) -> nn.Linear:
        """Map from latents to biases `[..., draft_vocab]`."""

    @abstractmethod
    def latents(self, states: Tensor, previous: Tensor) -> Tensor:
        """Return the latents `[..., position, rank]` of the first positions of blocks.

        Args:
            states: states of the backbone at all positions of the block, `[..., block, width]`.
            previous: token before each of the first positions, `[..., position]`.
        """

    def last_latent(self, states: Tensor, previous: Tensor) -> Tensor:
        """Return the latent `[..., rank]` of the last of these positions."""
        return self.latents(states, previous)[..., -1, :]

    def biased(self, base: Tensor, latents: Tensor) -> Tensor:
        """Return base logits `[..., draft_vocab]` with the biases of latents `[..., rank]`."""
        logits: Tensor = base + self.output(latents)
        return logits


class MarkovHead(BlockBias):
    """Bias `W2 W1[x]` by the token x before the position (DSpark, `vanilla`).

    Args:
        vocab_size: number of the target's tokens.
        num_outputs: size of the draft vocabulary.
        rank: size of the latents.
    """

    def __init__(self, vocab_size: int, num_outputs: int, rank: int) -> None:
        super().__init__()
        self.markov_w1 = nn.Embedding(vocab_size, rank)
        self.markov_w2 = nn.Linear(rank, num_outputs, bias=False)

    @property
    def output(self) -> nn.Linear:
        return self.markov_w2

    def latents(self, states: Tensor, previous: Tensor) -> Tensor:
        embedded: Tensor = self.markov_w1(previous)
        return embedded

    def last_latent(self, states: Tensor, previous: Tensor) -> Tensor:
        last = previous.shape[-1] - 1
        return self.latents(states[..., last : last + 1, :], previous[..., last:])[..., 0, :]


class GatedMarkovHead(MarkovHead):
    """Bias `W2 (sigmoid(G [h; W1[x]]) * W1[x])` by the backbone's state h too (DSpark, `gated`)."""

    def __init__(self, vocab_size: int, num_outputs: int, rank: int, width: int) -> None:
        super().__init__(vocab_size, num_outputs, rank)
        self.gate_proj = nn.Linear(width + rank, rank)

    def latents(self, states: Tensor, previous: Tensor) -> Tensor:
        embedded, states = self.markov_w1(previous), _first(states, previous)
        gates = self.gate_proj(torch.cat((states.to(embedded.dtype), embedded), -1)).sigmoid()
        gated: Tensor = gates * embedded
        return gated


class RecurrentMarkovHead(MarkovHead):
    """Bias by a recurrent state, which starts at zero in each block (DSpark, `rnn`)."""

    def __init__(self, vocab_size: int, num_outputs: int, rank: int, width: int) -> None:
        super().__init__(vocab_size, num_outputs, rank)
        self.joint_proj = nn.Linear(2 * rank + width, 3 * rank)

    def latents(self, states: Tensor, previous: Tensor) -> Tensor:
        embedded = self.markov_w1(previous)
        inputs = torch.cat((embedded, _first(states, previous).to(embedded.dtype)), -1)
        memory, outputs = torch.zeros_like(embedded[..., 0, :]), []
        for position in range(previous.shape[-1]):
            joined = self.joint_proj(torch.cat((memory, inputs[..., position, :]), -1))
            gate, candidate, output = joined.chunk(3, -1)
            kept = gate.sigmoid()
            memory = kept * memory + (1 - kept) * candidate.tanh()
            outputs.append(output.tanh())
        return torch.stack(outputs, -2)

    def last_latent(self, states: Tensor, previous: Tensor) -> Tensor:
        return self.latents(states, previous)[..., -1, :]


class PrefixCorrection(BlockBias):
    """Correction by the state of a GRU, which reads the embeddings of the tokens of the block (Domino).

    Args:
        vocab_size: size of the vocabulary.
        rank: size of the latents.
        width: size of the backbone's states and of embeddings.
        gru_size: size of the GRU's state.
        first: first position that the GRU reads a token for.
        first_corrected: first position with a correction.
        embed: embeddings of tokens.
    """

    def __init__(
        self,
        vocab_size: int,
        rank: int,
        width: int,
        gru_size: int,
        first: int,
        first_corrected: int,
        embed: Callable[[Tensor], Tensor],
    ) -> None:
        super().__init__()
        self.first, self.first_corrected, self._embed = first, first_corrected, embed
        self.prefix_gru = nn.GRU(width, gru_size, batch_first=True, bias=False)
        self.embed_proj = nn.Sequential(
            nn.Linear(width + gru_size, rank, bias=False), nn.SiLU(), nn.Linear(rank, vocab_size, bias=False)
        )

    @property
    def output(self) -> nn.Linear:
        output = self.embed_proj[2]
        assert isinstance(output, nn.Linear)
        return output

    def latents(self, states: Tensor, previous: Tensor) -> Tensor:
        tokens, dtype = previous[..., self.first :], self.output.weight.dtype
        summaries, _ = self.prefix_gru(self._embed(tokens.flatten(0, -2)).to(dtype))
        own = _first(states, previous)[..., self.first :, :].to(dtype)
        latents: Tensor = self.embed_proj[:2](torch.cat((own, summaries.view(*tokens.shape, -1)), -1))
        uncorrected = self.first_corrected - self.first
        latents = torch.cat(
            (torch.zeros_like(latents[..., :uncorrected, :]), latents[..., uncorrected:, :]), -2
        )
        return functional.pad(latents, (0, 0, self.first, 0))


class CandidateSelector(BlockBias):
    """Selector among the likeliest tokens of the base logits (DFlash2); all others get the probability zero.

    A candidate y after the token x has the bias `S[y] . (P[x] * H h)` with the backbone's state h.
    """

    def __init__(self, vocab_size: int, rank: int, width: int, top_k: int) -> None:
        super().__init__()
        self.top_k = top_k
        self.predecessor_codebook = nn.Parameter(torch.empty(vocab_size, rank))
        self.successor_codebook = nn.Parameter(torch.empty(vocab_size, rank))
        self.hidden_projection = nn.Linear(width, rank, bias=False)

    @property
    def output(self) -> nn.Linear:
        raise NotImplementedError("the selector has biases for its candidates alone; use biased()")

    def latents(self, states: Tensor, previous: Tensor) -> Tensor:
        projected = self.hidden_projection(_first(states, previous))
        latents: Tensor = self.predecessor_codebook[previous] * projected
        return latents

    def biased(self, base: Tensor, latents: Tensor) -> Tensor:
        values, candidates = base.topk(self.top_k, -1)
        biases = (self.successor_codebook[candidates] * latents[..., None, :]).sum(-1)
        return torch.full_like(base, -torch.inf).scatter(-1, candidates, values + biases.to(values.dtype))


class Refiner(BlockBias):
    """Causal refiner (xPress): it mixes the positions up to each, by weights per channel, and applies an MLP.

    Other engines apply it `num_jacobi_passes` times to whole blocks. Here positions are drafted in
    order, which is what these passes converge to.
    """

    precedes_anchor = True

    def __init__(
        self, vocab_size: int, num_outputs: int, rank: int, width: int, block_size: int, mlp_size: int
    ) -> None:
        super().__init__()
        self.token_embed = nn.Embedding(vocab_size, rank)
        self.down_h = nn.Linear(width, rank, bias=False)
        self.down_g = nn.Linear(width, rank, bias=False)
        self.in_proj = nn.Linear(3 * rank, rank, bias=False)
        self.mix_l = nn.Parameter(torch.zeros(rank, block_size, block_size))
        self.mlp_gate = nn.Linear(rank, mlp_size, bias=False)
        self.mlp_up = nn.Linear(rank, mlp_size, bias=False)
        self.mlp_down = nn.Linear(mlp_size, rank, bias=False)
        self.readout = nn.Linear(rank, num_outputs, bias=False)

    @property
    def output(self) -> nn.Linear:
        return self.readout

    def latents(self, states: Tensor, previous: Tensor) -> Tensor:
        embedded, length = self.token_embed(previous), previous.shape[-1]
        states = states.to(embedded.dtype)
        own = self.down_h(_first(states, previous))
        whole = self.down_g(states.mean(-2, keepdim=True)).expand_as(own)
        values = self.in_proj(torch.cat((own, whole, embedded), -1))
        mixing = self.mix_l[:, :length, :length].tril()
        values = values + torch.einsum("rij,...jr->...ir", mixing, values)
        refined: Tensor = values + self.mlp_down(functional.silu(self.mlp_gate(values)) * self.mlp_up(values))
        return refined


def _first(states: Tensor, previous: Tensor) -> Tensor:
    """Return the states at as many positions as there are tokens before them."""
    return states[..., : previous.shape[-1], :]
