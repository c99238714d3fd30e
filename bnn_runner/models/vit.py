"""A small vision transformer (Dosovitskiy et al. 2021)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor, nn

from bnn_runner.errors import UserError, raise_all
from bnn_runner.models.layers import TransformerBlock
from bnn_runner.tasks import TaskSpec


class Embedding(nn.Module):
    """Patches [B, T, D] by a linear map, a class token before them, and a learned position for each."""

    def __init__(self, channels: int, num_patches: int, patch: int, width: int) -> None:
        super().__init__()
        self.project = nn.Conv2d(channels, width, patch, patch)
        self.token = nn.Parameter(torch.zeros(width))
        self.positions = nn.Parameter(0.02 * torch.randn(1 + num_patches, width))

    def forward(self, x: Tensor) -> Tensor:
        patches = self.project(x).flatten(2).mT
        token = self.token.expand(len(x), 1, -1)
        return torch.cat([token, patches], dim=1) + self.positions


class ViTNetwork(nn.Module):
    """Embedding, `depth` blocks, a last norm; a linear output of the class token."""

    def __init__(
        self, channels: int, num_patches: int, num_outputs: int, patch: int, width: int, depth: int, heads: int
    ) -> None:
        super().__init__()
        self.embedding = Embedding(channels, num_patches, patch, width)
        self.blocks = nn.Sequential(*(TransformerBlock(width, heads, 2 * width) for _ in range(depth)))
        self.norm = nn.LayerNorm(width)
        self.out = nn.Linear(width, num_outputs)

    def forward(self, x: Tensor) -> Tensor:
        x = self.blocks(self.embedding(x))
        return self.out(self.norm(x[:, 0]))


@dataclass(frozen=True)
class ViT:
    """Square `patch` in pixels, `width` D of a token, `depth` blocks of `heads` heads and 2 D hidden units."""

    patch: int = 4
    width: int = 64
    depth: int = 4
    heads: int = 4
    cites: ClassVar[tuple[str, ...]] = ("dosovitskiy2021",)

    def __post_init__(self) -> None:
        problems = [f"model.{name} must be at least 1; got {value}." for name, value in vars(self).items() if value < 1]
        raise_all(problems)
        if self.width % self.heads or self.width < 2:
            raise UserError(
                f"model.width must be at least 2 and a multiple of model.heads={self.heads}; got {self.width}."
            )

    def problems(self, spec: TaskSpec) -> list[str]:
        if len(spec.input_shape) != 3:
            return [
                f"model=vit requires images; got inputs {list(spec.input_shape)} of data={spec.name}. Use model=mlp, "
                "or "
                "an image data set."
            ]
        height, width = spec.input_shape[1:]
        if height % self.patch or width % self.patch:
            return [f"model.patch must divide the {height} × {width} pixels of data={spec.name}; got {self.patch}."]
        return []

    def build(self, spec: TaskSpec) -> nn.Module:
        channels, height, width = spec.input_shape
        patches = (height // self.patch) * (width // self.patch)
        return ViTNetwork(channels, patches, spec.num_outputs, self.patch, self.width, self.depth, self.heads)
