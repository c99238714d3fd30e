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


class Shared(nn.Module):
    """One weight under two names, and a parameter that nothing uses."""

    def __init__(self, outputs: int = 2) -> None:
        super().__init__()
        self.first, self.second, self.out = nn.Linear(2, 2), nn.Linear(2, 2), nn.Linear(2, outputs)
        self.second.weight = self.first.weight
        self.unused = nn.Parameter(torch.ones(3))

    def forward(self, x: Tensor) -> Tensor:
        return self.out(torch.tanh(self.second(torch.tanh(self.first(x)))))


class Frozen(nn.Module):
    """A body whose parameters are not to be trained."""

    def __init__(self, inputs: int = 2, outputs: int = 2) -> None:
        super().__init__()
        self.body, self.out = nn.Linear(inputs, 4).requires_grad_(False), nn.Linear(4, outputs)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(torch.tanh(self.body(x)))


class FixedBody(nn.Module):
    """The same with the body's numbers in buffers."""

    def __init__(self, inputs: int = 2, outputs: int = 2) -> None:
        super().__init__()
        self.register_buffer("body", torch.linspace(-1, 1, 4 * inputs).reshape(4, inputs))
        self.out = nn.Linear(4, outputs)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(torch.tanh(x @ self.get_buffer("body").T))


class Double(nn.Module):
    """Parameters of 64 bits; `casts` its inputs to them."""

    def __init__(self, casts: bool = False) -> None:
        super().__init__()
        self.out, self.casts = nn.Linear(2, 2).double(), casts

    def forward(self, x: Tensor) -> Tensor:
        return self.out(x.double() if self.casts else x)


class Normed(nn.Module):
    """Batch normalisation, which a batch of one point would break."""

    def __init__(self) -> None:
        super().__init__()
        self.hidden, self.norm, self.out = nn.Linear(2, 5), nn.BatchNorm1d(5), nn.Linear(5, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(torch.tanh(self.norm(self.hidden(x))))
