"""Distributions of continuous values, in batches.

Unlike those of `torch.distributions`, their samples are functions of given uniforms, so that the keyed
noise determines them, and a batch can be indexed. Densities are computed here too, which takes half
the time for the few values of a round. All tensors are float64, since acceptance depends on ratios
of densities.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass
from types import EllipsisType
from typing import Self

import torch
from torch import Tensor

Index = Tensor | slice | EllipsisType | None | tuple[Tensor | slice | EllipsisType | None, ...]


class Distribution(ABC):
    """Batch `[...]` of independent distributions over vectors of `dim` values."""

    @property
    @abstractmethod
    def num_uniforms(self) -> int:
        """Number of uniforms that a draw takes."""

    @abstractmethod
    def log_density(self, values: Tensor) -> Tensor:
        """Return the log densities `[...]` of values `[..., dim]`."""

    @abstractmethod
    def sample(self, uniforms: Tensor) -> Tensor:
        """Return draws `[..., dim]`, a function of `[..., num_uniforms]` uniforms in (0, 1)."""

    @abstractmethod
    def at(self, index: Index) -> Self:
        """Return a part of the batch, indexed like a tensor `[...]`."""


@dataclass(frozen=True)
class Gaussian(Distribution):
    """Gaussians with diagonal covariance: `loc` and `scale` `[..., dim]`."""

    loc: Tensor
    scale: Tensor

    @property
    def num_uniforms(self) -> int:
        return self.loc.shape[-1]

    def log_density(self, values: Tensor) -> Tensor:
        standard = (values - self.loc) / self.scale
        return -(standard.square() / 2 + self.scale.log() + math.log(2 * math.pi) / 2).sum(-1)

    def sample(self, uniforms: Tensor) -> Tensor:
        standard: Tensor = torch.special.ndtri(uniforms)
        return self.loc + self.scale * standard

    def at(self, index: Index) -> Self:
        return type(self)(self.loc[index], self.scale[index])


@dataclass(frozen=True)
class StudentT(Distribution):
    """Vectors of independent Student-t variables: `df`, `loc` and `scale` `[..., dim]`."""

    df: Tensor
    loc: Tensor
    scale: Tensor

    @property
    def num_uniforms(self) -> int:
        return 2 * self.loc.shape[-1]

    def log_density(self, values: Tensor) -> Tensor:
        standard, half = (values - self.loc) / self.scale, (self.df + 1) / 2
        factor = half.lgamma() - (self.df / 2).lgamma() - (math.pi * self.df).log() / 2 - self.scale.log()
        return (factor - half * (standard.square() / self.df).log1p()).sum(-1)

    def sample(self, uniforms: Tensor) -> Tensor:
        """Return draws by the polar form of Bailey (1994): Box and Muller's, with another radius."""
        radius, angle = uniforms.chunk(2, -1)
        squared = self.df * torch.expm1(-2 / self.df * radius.log())
        return self.loc + self.scale * squared.sqrt() * (2 * torch.pi * angle).cos()

    def at(self, index: Index) -> Self:
        return type(self)(self.df[index], self.loc[index], self.scale[index])
