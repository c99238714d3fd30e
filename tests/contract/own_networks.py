"""Networks as a user has them: plain modules that know nothing of the runner."""

from __future__ import annotations

import torch
from torch import Tensor, nn


class SmallConv(nn.Module):
    """Colour images of any size to `num_outputs` numbers; a norm layer with running statistics inside."""

    def __init__(self, num_outputs: int = 2, width: int = 8) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, width, 3, padding=1)
        self.norm = nn.BatchNorm2d(width)
        self.out = nn.Linear(width, num_outputs)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(torch.tanh(self.norm(self.conv(x))).mean((2, 3)))


def small_conv(**arguments: int) -> nn.Module:
    """A function that makes one."""
    return SmallConv(**arguments)


class Rows(nn.Module):
    """Rows of numbers to numbers."""

    def __init__(self, inputs: int, outputs: int, width: int = 8) -> None:
        super().__init__()
        self.hidden, self.out = nn.Linear(inputs, width), nn.Linear(width, outputs)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(torch.tanh(self.hidden(x)))


class Flat(nn.Module):
    """Forgets the last axis of its outputs."""

    def __init__(self) -> None:
        super().__init__()
        self.out = nn.Linear(1, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(x).squeeze(-1)


def number() -> int:
    """No network at all."""
    return 3
