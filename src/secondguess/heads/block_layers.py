"""Decoder layers of block drafters: what the positions of a block attend to, and the convolutions of DFlash2."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from secondguess.heads.layer import AttentionFunction, CosSin, run_attention, run_layer


@dataclass(frozen=True)
class BlockAttention:
    """Range that the positions of a block attend to in one layer.

    Args:
        window: number of positions; 0 for the whole text before the block, and the block.
        is_causal: whether a position attends to no later one of its block.
        from_anchor: whether the window is the text before the block (speculators), not that before
            each position and the position itself (other formats), which is no smaller than a block.
    """

    window: int = 0
    is_causal: bool = False
    from_anchor: bool = False

    def mask(self, anchors: Tensor, queries: Tensor, keys: Tensor) -> Tensor | None:
        """Return which text positions `keys` positions `queries` of the blocks at `anchors` attend to; None for all.

        The arguments are broadcast. Keys of other blocks, and those of the text at the block, are not excluded.
        """
        allowed = keys <= queries if self.is_causal else None
        if not self.window:
            return allowed
        near = keys >= anchors - self.window if self.from_anchor else keys > queries - self.window
        return near if allowed is None else near & allowed


@dataclass(frozen=True)
class ConvolutionConfig:
    """Sizes of the convolutions of a layer: number of taps, and of channels that share their weights."""

    kernel_size: int
    group_size: int


class GroupedConvolution(nn.Module):
    """Causal convolutions within blocks of the input and of the output of a part of a layer (DFlash2).

    A tap has a fixed weight per channel, plus one per group of channels that depends on the input.
    """

    def __init__(self, width: int, config: ConvolutionConfig) -> None:
        super().__init__()
        kernels = torch.zeros(2, config.kernel_size, width)
        kernels[:, 0] = 1
        self.group_size = config.group_size
        self.base_kernel = nn.Parameter(kernels)
        num_weights = 2 * config.kernel_size * (width // config.group_size)
        self.kernel_projection = nn.Linear(width, num_weights, bias=False)

    def kernels(self, inputs: Tensor) -> tuple[Tensor, Tensor]:
        """Return the weights `[..., tap, channel]` for the input and for the output, by inputs `[..., channel]`."""
        shape = (*inputs.shape[:-1], *self.base_kernel.shape[:2], -1)
        by_group = self.kernel_projection(inputs).view(shape)
        before, after = (self.base_kernel + by_group.repeat_interleave(self.group_size, -1)).unbind(-3)
        return before, after

    def forward(self, values: Tensor, kernel: Tensor) -> Tensor:
        """Return the sum over taps of earlier values `[..., position, channel]`; positions before the block are zero."""
        output = values * kernel[..., 0, :]
        for tap in range(1, kernel.shape[-2]):
            output[..., tap:, :] += values[..., :-tap, :] * kernel[..., tap:, tap, :]
        return output


def add_convolutions(layer: Any, width: int, config: ConvolutionConfig) -> None:
    """Add the convolutions around the attention and the feed-forward network to a layer."""
    layer.attention_conv = GroupedConvolution(width, config)
    layer.mlp_conv = GroupedConvolution(width, config)


def run_block_layer(
    layer: Any,
    states: Tensor,
    cos_sin: CosSin,
    attend: AttentionFunction,
    block_size: int,
    has_convolutions: bool,
) -> Tensor:
    """Return the output of a layer for the positions of whole blocks, `[row, position, width]`."""
    if not has_convolutions:
        return run_layer(layer, states, cos_sin, attend)

    def convolve(convolution: Any, values: Tensor, kernel: Tensor) -> Tensor:
        num_rows, length = values.shape[:2]
        shape = (num_rows, length // block_size, block_size)
        convolved: Tensor = convolution(values.view(*shape, -1), kernel.view(*shape, *kernel.shape[2:]))
        return convolved.flatten(1, 2)

    inputs = layer.input_layernorm(states)
    before, after = layer.attention_conv.kernels(inputs)
    attended = run_attention(layer, convolve(layer.attention_conv, inputs, before), cos_sin, attend)
    states = states + convolve(layer.attention_conv, attended, after)
    inputs = layer.post_attention_layernorm(states)
    before, after = layer.mlp_conv.kernels(inputs)
    output = layer.mlp(convolve(layer.mlp_conv, inputs, before))
    return states + convolve(layer.mlp_conv, output, after)
