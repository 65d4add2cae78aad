"""Chain of MTP modules, of which each drafts one token (DeepSeek-V3, arXiv 2412.19437, section 2.2).

Module k reads the tokens k + 1 positions ahead, each with the output of module k - 1 at its
position; module 0 reads the target's last hidden state. As in Transformers, that output is the one
after the last norm.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Self

from torch import nn

from secondguess.heads.base import LoadedHead, TargetModel
from secondguess.heads.learning import LAST_HIDDEN
from secondguess.heads.mtp import MtpHead, find_module


class MtpChain(LoadedHead):
    """All MTP modules of a checkpoint."""

    hidden_layers = (LAST_HIDDEN,)

    def __init__(self, modules: Iterable[MtpHead], target: TargetModel) -> None:
        super().__init__()
        self.target, self.links = target, nn.ModuleList(modules)
        for module in self.heads:
            module.norm_output = True

    @property
    def heads(self) -> list[MtpHead]:
        """Modules in the order of their tokens."""
        return [module for module in self.links if isinstance(module, MtpHead)]

    @classmethod
    def load(cls, folder: Path, target: TargetModel) -> Self:
        stored = find_module(folder)
        modules = [MtpHead.read(stored.module(index), target) for index in range(stored.num_modules)]
        return cls(modules, target)
