"""A small transformer over token ids: embedding and positions, pre-norm blocks, the mean over real tokens."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor, nn

from bnn_runner.errors import UserError, raise_all
from bnn_runner.models.layers import TransformerBlock
from bnn_runner.tasks import TaskSpec


class PositionEmbedding(nn.Module):
    """x + p with a learned p for each place."""

    def __init__(self, tokens: int, width: int) -> None:
        super().__init__()
        self.table = nn.Parameter(0.02 * torch.randn(tokens, width))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.table


class TextTransformerNetwork(nn.Module):
    """Token ids [B, T], 0 for padding, which neither is attended to nor counts in the mean.

    A text of padding alone gets the output of a zero mean.
    """

    def __init__(self, vocabulary: int, tokens: int, num_outputs: int, width: int, depth: int, heads: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        nn.init.normal_(self.embedding.weight, std=width**-0.5)
        self.positions = PositionEmbedding(tokens, width)
        self.blocks = nn.ModuleList(TransformerBlock(width, heads, 2 * width) for _ in range(depth))
        self.norm = nn.LayerNorm(width)
        self.out = nn.Linear(width, num_outputs)

    def forward(self, ids: Tensor) -> Tensor:
        mask = ids != 0
        x = self.positions(self.embedding(ids))
        for block in self.blocks:
            x = block(x, mask)
        real = mask.unsqueeze(-1).to(x.dtype)
        return self.out((self.norm(x) * real).sum(1) / real.sum(1).clamp_min(1))


@dataclass(frozen=True)
class TextTransformer:
    """`width` D of a token, `depth` blocks of `heads` heads and 2 D hidden units; the vocabulary is the task's."""

    width: int = 64
    depth: int = 2
    heads: int = 4
    takes_tokens: ClassVar[bool] = True
    cites: ClassVar[tuple[str, ...]] = ("vaswani2017",)

    def __post_init__(self) -> None:
        problems = [f"model.{name} must be at least 1; got {value}." for name, value in vars(self).items() if value < 1]
        raise_all(problems)
        if self.width % self.heads or self.width < 2:
            raise UserError(
                f"model.width must be at least 2 and a multiple of model.heads={self.heads}; got {self.width}."
            )

    def problems(self, spec: TaskSpec) -> list[str]:
        if spec.vocabulary:
            return []
        return [
            f"model=text_transformer requires token ids; the inputs of data={spec.name} are numbers. Use a text data "
            "set, "
            "or model=mlp."
        ]

    def build(self, spec: TaskSpec) -> nn.Module:
        (tokens,) = spec.input_shape
        return TextTransformerNetwork(spec.vocabulary, tokens, spec.num_outputs, self.width, self.depth, self.heads)
