"""LeNet-5 in its modern form: two 5×5 convolutions with max-pooling, then 120 and 84 units."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor, nn

from bnn_runner.models.mlp import ACTIVATIONS
from bnn_runner.tasks import TaskSpec


class LeNetNetwork(nn.Module):
    """1-6-16-120-84-K after LeCun et al. 1998; 61,706 parameters on 28 × 28 with padding 2."""

    def __init__(self, channels: int, size: tuple[int, int], num_outputs: int, activation: str) -> None:
        super().__init__()
        pad = 2 if min(size) <= 28 else 0
        flat = 16
        for n in size:
            flat *= ((n + 2 * pad - 4) // 2 - 4) // 2
        self.conv1 = nn.Conv2d(channels, 6, 5, padding=pad)
        self.conv2 = nn.Conv2d(6, 16, 5)
        self.fc1 = nn.Linear(flat, 120)
        self.fc2 = nn.Linear(120, 84)
        self.out = nn.Linear(84, num_outputs)
        self.activation = ACTIVATIONS[activation]

    def forward(self, x: Tensor) -> Tensor:
        act = self.activation
        x = nn.functional.max_pool2d(act(self.conv1(x)), 2)
        x = nn.functional.max_pool2d(act(self.conv2(x)), 2)
        x = torch.flatten(x, 1)
        return self.out(act(self.fc2(act(self.fc1(x)))))


@dataclass(frozen=True)
class LeNet:
    """`activation` of every hidden layer."""

    activation: Literal["relu", "tanh", "gelu", "silu"] = "relu"
    cites: ClassVar[tuple[str, ...]] = ("lecun1998",)

    def problems(self, spec: TaskSpec) -> list[str]:
        if len(spec.input_shape) == 3 and min(spec.input_shape[1:]) >= 16:
            return []
        return [
            f"model=lenet requires images of at least 16 × 16 pixels; got inputs {list(spec.input_shape)} of "
            f"data={spec.name}. Use model=mlp, or an image data set."
        ]

    def build(self, spec: TaskSpec) -> nn.Module:
        channels, height, width = spec.input_shape
        return LeNetNetwork(channels, (height, width), spec.num_outputs, self.activation)
