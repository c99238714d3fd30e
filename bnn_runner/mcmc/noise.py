"""Gaussian noise of chains: the numbers of chain l at step t do not depend on the other chains."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from bnn_runner.rng import generator

_BLOCK = 1 << 16


class ChainNoise:
    """Standard normal noise [L, P] of every step, from the stream (seed of the chain, `name`).

    Numbers are drawn in blocks of steps whose size depends on P only, so that there is one generator per block and
    a step has the same numbers after a restart.
    """

    def __init__(self, seeds: Sequence[int], name: str, size: int, dtype: torch.dtype, device: torch.device) -> None:
        self.seeds, self.name, self.size, self.dtype, self.device = tuple(seeds), name, size, dtype, device
        self.steps = max(1, _BLOCK // size)
        self._block: tuple[int, Tensor] | None = None

    def at(self, step: int) -> Tensor:
        """The noise [L, P] of step `step`, counted from 0."""
        block, place = divmod(step, self.steps)
        if self._block is None or self._block[0] != block:
            lanes = [
                torch.randn(self.steps, self.size, generator=generator(seed, self.name, block), dtype=self.dtype)
                for seed in self.seeds
            ]
            self._block = block, torch.stack(lanes, dim=1).to(self.device)
        return self._block[1][place]
