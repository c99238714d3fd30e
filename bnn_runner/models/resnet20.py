"""ResNet-20 for 32 × 32 images (He et al. 2016, §4.2), with batch or group normalisation."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor, nn

from bnn_runner.errors import UserError
from bnn_runner.tasks import TaskSpec


def _norm(kind: str, channels: int, groups: int) -> nn.Module:
    return nn.BatchNorm2d(channels) if kind == "batch" else nn.GroupNorm(min(groups, channels), channels)


class Block(nn.Module):
    """Two 3 × 3 convolutions and a parameter-free shortcut (subsampled, channels padded with zeros: option A)."""

    def __init__(self, inputs: int, outputs: int, stride: int, norm: str, groups: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False)
        self.norm1 = _norm(norm, outputs, groups)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False)
        self.norm2 = _norm(norm, outputs, groups)
        self.stride = stride
        self.extra = outputs - inputs

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm2(self.conv2(torch.relu(self.norm1(self.conv1(x)))))
        if self.stride > 1 or self.extra:
            before = self.extra // 2
            x = nn.functional.pad(x[:, :, :: self.stride, :: self.stride], (0, 0, 0, 0, before, self.extra - before))
        return torch.relu(h + x)


class ResNetNetwork(nn.Module):
    """A 3 × 3 stem, three stages of three blocks with 16, 32 and 64 channels (times `width`), mean pooling."""

    def __init__(self, channels: int, num_outputs: int, width: int, norm: str, groups: int) -> None:
        super().__init__()
        widths = [16 * width, 32 * width, 64 * width]
        self.stem = nn.Conv2d(channels, widths[0], 3, 1, 1, bias=False)
        self.stem_norm = _norm(norm, widths[0], groups)
        blocks, inputs = [], widths[0]
        for stage, outputs in enumerate(widths):
            for i in range(3):
                blocks.append(Block(inputs, outputs, 2 if stage > 0 and i == 0 else 1, norm, groups))
                inputs = outputs
        self.blocks = nn.Sequential(*blocks)
        self.out = nn.Linear(inputs, num_outputs)
        for m in self.modules():
            if isinstance(m, nn.Conv2d):
                nn.init.kaiming_normal_(m.weight, nonlinearity="relu")

    def forward(self, x: Tensor) -> Tensor:
        x = torch.relu(self.stem_norm(self.stem(x)))
        x = self.blocks(x)
        return self.out(x.mean(dim=(2, 3)))


@dataclass(frozen=True)
class ResNet20:
    """`norm` batch or group (`groups` groups); `width` multiplies the channels."""

    norm: Literal["batch", "group"] = "batch"
    groups: int = 8
    width: int = 1
    cites: ClassVar[tuple[str, ...]] = ("he2016",)

    def __post_init__(self) -> None:
        if self.width < 1 or self.groups < 1 or (16 * self.width) % self.groups:
            raise UserError(
                f"model.width and model.groups must be at least 1, and groups must divide 16 × width; got "
                f"{self.width} and {self.groups}."
            )

    def problems(self, spec: TaskSpec) -> list[str]:
        if len(spec.input_shape) == 3 and min(spec.input_shape[1:]) >= 8:
            return []
        return [
            f"model=resnet20 requires images of at least 8 × 8 pixels; got inputs {list(spec.input_shape)} of "
            f"data={spec.name}. Use model=mlp, or an image data set."
        ]

    def build(self, spec: TaskSpec) -> nn.Module:
        return ResNetNetwork(spec.input_shape[0], spec.num_outputs, self.width, self.norm, self.groups)
