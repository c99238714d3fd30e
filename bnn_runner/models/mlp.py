"""The multilayer perceptron, with optional batch or layer normalisation and residual connections."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from math import prod
from typing import ClassVar, Literal

import torch
from torch import Tensor, nn

from bnn_runner.errors import raise_all
from bnn_runner.models.layers import BatchNorm, LayerNorm, Linear
from bnn_runner.tasks import TaskSpec

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "relu": torch.relu,
    "tanh": torch.tanh,
    "gelu": nn.functional.gelu,
    "silu": nn.functional.silu,
}


def _norm(kind: str, width: int) -> nn.Module:
    if kind == "none":
        return nn.Identity()
    return BatchNorm(width) if kind == "batch" else LayerNorm(width)


class MLPNetwork(nn.Module):
    """Hidden layers of (linear, norm, activation), a skip around those that keep their width, a linear output."""

    stacks_lanes: ClassVar[bool] = True

    def __init__(self, sizes: list[int], num_outputs: int, activation: str, norm: str, residual: bool) -> None:
        super().__init__()
        self.hidden = nn.ModuleList(Linear(a, b) for a, b in pairwise(sizes))
        self.norms = nn.ModuleList(_norm(norm, width) for width in sizes[1:])
        self.out = Linear(sizes[-1], num_outputs)
        self.activation = ACTIVATIONS[activation]
        self.residual = residual
        self.num_features = sizes[0]

    def forward(self, x: Tensor) -> Tensor:
        lanes = self.out.weight.dim() == 3
        x = x.reshape(*x.shape[: 2 if lanes else 1], self.num_features)
        for linear, norm in zip(self.hidden, self.norms, strict=True):
            h = self.activation(norm(linear(x)))
            x = x + h if self.residual and h.shape[-1] == x.shape[-1] else h
        return self.out(x)


@dataclass(frozen=True)
class MLP:
    """`hidden` widths, `activation`, `norm` before the activation, `residual` skips between equal widths."""

    hidden: tuple[int, ...] = (50, 50)
    activation: Literal["relu", "tanh", "gelu", "silu"] = "tanh"
    norm: Literal["none", "batch", "layer"] = "none"
    residual: bool = False

    def __post_init__(self) -> None:
        object.__setattr__(self, "hidden", tuple(self.hidden))
        problems = []
        if any(width < 1 for width in self.hidden):
            problems.append(f"model.hidden must be widths of at least 1; got {list(self.hidden)}.")
        if self.norm == "layer" and any(width < 2 for width in self.hidden):
            problems.append(
                f"model.hidden must be widths of at least 2 with model.norm=layer, which makes a single unit constant; "
                f"got {list(self.hidden)}."
            )
        raise_all(problems)

    def problems(self, spec: TaskSpec) -> list[str]:
        return []

    def build(self, spec: TaskSpec) -> nn.Module:
        sizes = [prod(spec.input_shape), *self.hidden]
        return MLPNetwork(sizes, spec.num_outputs, self.activation, self.norm, self.residual)
