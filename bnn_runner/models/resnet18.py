"""ResNet-18 for 32 × 32 images (He et al. 2016): batch, group, layer or filter response norm, or none (fixup)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor, nn

from bnn_runner.errors import UserError
from bnn_runner.models.layers import norm_layer, rectifier
from bnn_runner.tasks import TaskSpec


def _conv(inputs: int, outputs: int, kernel: int, stride: int = 1) -> nn.Conv2d:
    conv = nn.Conv2d(inputs, outputs, kernel, stride, kernel // 2, bias=False)
    nn.init.kaiming_normal_(conv.weight, mode="fan_out", nonlinearity="relu")
    return conv


class Block(nn.Module):
    """Two 3 × 3 convolutions with a norm each; the shortcut is a 1 × 1 convolution with a norm where shapes change."""

    def __init__(self, inputs: int, outputs: int, stride: int, norm: str, groups: int) -> None:
        super().__init__()
        self.conv1 = _conv(inputs, outputs, 3, stride)
        self.norm1 = norm_layer(norm, outputs, groups)
        self.act1 = rectifier(norm, outputs)
        self.conv2 = _conv(outputs, outputs, 3)
        self.norm2 = norm_layer(norm, outputs, groups)
        self.shortcut = nn.Sequential()
        if stride > 1 or inputs != outputs:
            self.shortcut = nn.Sequential(_conv(inputs, outputs, 1, stride), norm_layer(norm, outputs, groups))
        self.act2 = rectifier(norm, outputs)

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm2(self.conv2(self.act1(self.norm1(self.conv1(x)))))
        return self.act2(h + self.shortcut(x))


class FixupBlock(nn.Module):
    """The same without norms: scalar shifts before each convolution and ReLU, one scalar scale (Zhang et al. 2019, §3).

    The last convolution starts at zero and the first is scaled by (number of blocks)^(-1/2).
    """

    def __init__(self, inputs: int, outputs: int, stride: int, num_blocks: int) -> None:
        super().__init__()
        self.conv1, self.conv2 = _conv(inputs, outputs, 3, stride), _conv(outputs, outputs, 3)
        self.shift1a, self.shift1b, self.shift2a, self.shift2b = (nn.Parameter(torch.zeros(1)) for _ in range(4))
        self.scale = nn.Parameter(torch.ones(1))
        self.shortcut = _conv(inputs, outputs, 1, stride) if stride > 1 or inputs != outputs else nn.Identity()
        with torch.no_grad():
            self.conv1.weight.mul_(num_blocks**-0.5)
            self.conv2.weight.zero_()

    def forward(self, x: Tensor) -> Tensor:
        shifted = x + self.shift1a
        h = torch.relu(self.conv1(shifted) + self.shift1b)
        h = self.conv2(h + self.shift2a) * self.scale + self.shift2b
        return torch.relu(h + (x if isinstance(self.shortcut, nn.Identity) else self.shortcut(shifted)))


class FixupStem(nn.Module):
    """3 × 3 convolution and a scalar shift."""

    def __init__(self, channels: int, outputs: int) -> None:
        super().__init__()
        self.conv = _conv(channels, outputs, 3)
        self.shift = nn.Parameter(torch.zeros(1))

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(self.conv(x) + self.shift)


class FixupHead(nn.Module):
    """Linear output that starts at zero, its input shifted by a scalar."""

    def __init__(self, inputs: int, num_outputs: int) -> None:
        super().__init__()
        self.shift = nn.Parameter(torch.zeros(1))
        self.linear = nn.Linear(inputs, num_outputs)
        nn.init.zeros_(self.linear.weight)
        nn.init.zeros_(self.linear.bias)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x + self.shift)


class ResNet18Network(nn.Module):
    """A 3 × 3 stem without max-pooling, stages of blocks (each but the first halves the size), mean pooling."""

    def __init__(
        self, channels: int, num_outputs: int, widths: tuple[int, ...], blocks: tuple[int, ...], norm: str, groups: int
    ) -> None:
        super().__init__()
        fixup = norm == "none"
        self.stem: nn.Module = (
            FixupStem(channels, widths[0])
            if fixup
            else nn.Sequential(
                _conv(channels, widths[0], 3), norm_layer(norm, widths[0], groups), rectifier(norm, widths[0])
            )
        )
        stages: list[nn.Module] = []
        inputs = widths[0]
        for stage, (outputs, count) in enumerate(zip(widths, blocks, strict=True)):
            for i in range(count):
                stride = 2 if stage > 0 and i == 0 else 1
                stages.append(
                    FixupBlock(inputs, outputs, stride, sum(blocks))
                    if fixup
                    else Block(inputs, outputs, stride, norm, groups)
                )
                inputs = outputs
        self.blocks = nn.Sequential(*stages)
        self.out = FixupHead(inputs, num_outputs) if fixup else nn.Linear(inputs, num_outputs)

    def forward(self, x: Tensor) -> Tensor:
        x = self.blocks(self.stem(x))
        return self.out(x.mean(dim=(2, 3)))


@dataclass(frozen=True)
class ResNet18:
    """Channels (`widths`) and number of `blocks` of each stage; `norm` (`groups` of group norm), none with fixup.

    With batch norm, three colours and ten classes it has 11,173,962 parameters.
    """

    widths: tuple[int, ...] = (64, 128, 256, 512)
    blocks: tuple[int, ...] = (2, 2, 2, 2)
    norm: Literal["batch", "group", "layer", "filter_response", "none"] = "batch"
    groups: int = 32
    cites: ClassVar[tuple[str, ...]] = ("he2016",)

    def __post_init__(self) -> None:
        object.__setattr__(self, "widths", tuple(self.widths))
        object.__setattr__(self, "blocks", tuple(self.blocks))
        sizes = f"model.widths={list(self.widths)} with model.blocks={list(self.blocks)}"
        if not self.widths or len(self.widths) != len(self.blocks) or min(*self.widths, *self.blocks) < 1:
            raise UserError(f"{sizes} must be lists of equal length with entries of at least 1, one per stage.")
        if self.norm == "group" and (self.groups < 1 or any(width % self.groups for width in self.widths)):
            raise UserError(
                f"model.groups must be at least 1 and divide each of model.widths={list(self.widths)}; got "
                f"{self.groups}."
            )

    def problems(self, spec: TaskSpec) -> list[str]:
        least = 2 ** (len(self.widths) - 1)
        if len(spec.input_shape) == 3 and min(spec.input_shape[1:]) >= least:
            return []
        return [
            f"model=resnet18 requires images of at least {least} × {least} pixels; got inputs {list(spec.input_shape)} "
            "of "
            f"data={spec.name}. Use model=mlp, or an image data set."
        ]

    def build(self, spec: TaskSpec) -> nn.Module:
        channels = spec.input_shape[0]
        return ResNet18Network(channels, spec.num_outputs, self.widths, self.blocks, self.norm, self.groups)
