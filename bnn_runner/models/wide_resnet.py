"""Wide residual networks (Zagoruyko & Komodakis 2016): pre-activation blocks, few layers, many channels."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor, nn

from bnn_runner.errors import UserError
from bnn_runner.models.layers import norm_layer
from bnn_runner.tasks import TaskSpec


class Block(nn.Module):
    """Norm, ReLU, 3 × 3 convolution, twice; a 1 × 1 convolution of the first ReLU's output where shapes change."""

    def __init__(self, inputs: int, outputs: int, stride: int, norm: str, groups: int) -> None:
        super().__init__()
        self.norm1 = norm_layer(norm, inputs, groups)
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False)
        self.norm2 = norm_layer(norm, outputs, groups)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False)
        changes = stride > 1 or inputs != outputs
        self.shortcut = nn.Conv2d(inputs, outputs, 1, stride, bias=False) if changes else None

    def forward(self, x: Tensor) -> Tensor:
        active = torch.relu(self.norm1(x))
        h = self.conv2(torch.relu(self.norm2(self.conv1(active))))
        return h + (x if self.shortcut is None else self.shortcut(active))


class WideResNetNetwork(nn.Module):
    """A 3 × 3 stem, three stages of (depth − 4)/6 blocks, a last norm and ReLU, mean pooling, a linear output."""

    def __init__(
        self, channels: int, num_outputs: int, depth: int, base: int, widen: int, norm: str, groups: int
    ) -> None:
        super().__init__()
        self.stem = nn.Conv2d(channels, base, 3, 1, 1, bias=False)
        blocks, inputs = [], base
        for stage in range(3):
            outputs = base * widen * 2**stage
            for i in range((depth - 4) // 6):
                blocks.append(Block(inputs, outputs, 2 if stage > 0 and i == 0 else 1, norm, groups))
                inputs = outputs
        self.blocks = nn.Sequential(*blocks)
        self.norm = norm_layer(norm, inputs, groups)
        self.out = nn.Linear(inputs, num_outputs)
        for m in self.modules():
            if isinstance(m, nn.Conv2d):
                nn.init.kaiming_normal_(m.weight, mode="fan_out", nonlinearity="relu")

    def forward(self, x: Tensor) -> Tensor:
        x = torch.relu(self.norm(self.blocks(self.stem(x))))
        return self.out(x.mean(dim=(2, 3)))


@dataclass(frozen=True)
class WideResNet:
    """WRN-`depth`-`widen` over `base` channels; `norm` batch or group (`groups` groups)."""

    depth: int = 16
    widen: int = 4
    base: int = 16
    norm: Literal["batch", "group"] = "batch"
    groups: int = 8
    cites: ClassVar[tuple[str, ...]] = ("zagoruyko2016",)

    def __post_init__(self) -> None:
        if self.depth < 10 or (self.depth - 4) % 6:
            raise UserError(f"model.depth must be 6 n + 4, as in 10, 16, 22, 28 or 40; got {self.depth}.")
        if self.widen < 1 or self.base < 1:
            raise UserError(f"model.widen and model.base must be at least 1; got {self.widen} and {self.base}.")
        if self.norm == "group" and (self.groups < 1 or self.base % self.groups):
            raise UserError(f"model.groups must be at least 1 and divide model.base={self.base}; got {self.groups}.")

    def problems(self, spec: TaskSpec) -> list[str]:
        if len(spec.input_shape) == 3 and min(spec.input_shape[1:]) >= 4:
            return []
        return [
            f"model=wrn16_4 requires images of at least 4 × 4 pixels; got inputs {list(spec.input_shape)} of "
            f"data={spec.name}. Use model=mlp, or an image data set."
        ]

    def build(self, spec: TaskSpec) -> nn.Module:
        return WideResNetNetwork(
            spec.input_shape[0], spec.num_outputs, self.depth, self.base, self.widen, self.norm, self.groups
        )
