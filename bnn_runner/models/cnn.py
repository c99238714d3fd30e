"""Small convolutional networks with batch or group normalisation, standardised weights, or neither."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import Literal

from torch import Tensor, nn

from bnn_runner.errors import UserError
from bnn_runner.models.layers import StandardisedConv, norm_layer
from bnn_runner.models.mlp import ACTIVATIONS
from bnn_runner.tasks import TaskSpec


class CNNNetwork(nn.Module):
    """Layers of (convolution that keeps the size, norm, activation), halved by max-pooling between them.

    A linear output layer follows the mean over the positions of the last one.
    """

    def __init__(
        self, sizes: list[int], kernels: list[int], num_outputs: int, activation: str, norm: str, groups: int
    ) -> None:
        super().__init__()
        shapes = list(zip(pairwise(sizes), kernels, strict=True))
        self.convs = nn.ModuleList(
            StandardisedConv(a, b, k, k // 2)
            if norm == "weight_standardised"
            else nn.Conv2d(a, b, k, padding=k // 2, bias=norm == "none")  # a norm's shift does what a bias does
            for (a, b), k in shapes
        )
        self.norms = nn.ModuleList(norm_layer(norm, width, groups) for width in sizes[1:])
        self.out = nn.Linear(sizes[-1], num_outputs)
        self.activation = ACTIVATIONS[activation]

    def forward(self, x: Tensor) -> Tensor:
        for i, (conv, norm) in enumerate(zip(self.convs, self.norms, strict=True)):
            if i > 0:
                x = nn.functional.max_pool2d(x, 2)
            x = self.activation(norm(conv(x)))
        return self.out(x.mean(dim=(2, 3)))


@dataclass(frozen=True)
class CNN:
    """`channels` and odd `kernels` of each convolution, `activation`, `norm` before it (`groups` of group norm)."""

    channels: tuple[int, ...] = (32, 64, 64)
    kernels: tuple[int, ...] = (3, 3, 3)
    activation: Literal["relu", "tanh", "gelu", "silu"] = "relu"
    norm: Literal["none", "batch", "group", "weight_standardised"] = "none"
    groups: int = 8

    def __post_init__(self) -> None:
        object.__setattr__(self, "channels", tuple(self.channels))
        object.__setattr__(self, "kernels", tuple(self.kernels))
        sizes = f"model.channels={list(self.channels)} with model.kernels={list(self.kernels)}"
        if not self.channels or len(self.channels) != len(self.kernels):
            raise UserError(f"{sizes} must be lists of equal length, one entry per convolution.")
        if min(self.channels) < 1 or any(k < 1 or k % 2 == 0 for k in self.kernels):
            raise UserError(f"{sizes}: channels must be at least 1, and kernels odd.")
        if self.norm == "group" and (self.groups < 1 or any(c % self.groups for c in self.channels)):
            raise UserError(
                f"model.groups must be at least 1 and divide each of model.channels={list(self.channels)}; got "
                f"{self.groups}."
            )

    def problems(self, spec: TaskSpec) -> list[str]:
        least = 2 ** (len(self.channels) - 1)
        if len(spec.input_shape) == 3 and min(spec.input_shape[1:]) >= least:
            return []
        return [
            f"model=cnn with {len(self.channels)} convolutions requires images of at least {least} × {least} pixels; "
            "got "
            f"inputs {list(spec.input_shape)} of data={spec.name}. Use model=mlp, or an image data set."
        ]

    def build(self, spec: TaskSpec) -> nn.Module:
        sizes = [spec.input_shape[0], *self.channels]
        return CNNNetwork(sizes, list(self.kernels), spec.num_outputs, self.activation, self.norm, self.groups)
