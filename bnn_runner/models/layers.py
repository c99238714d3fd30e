"""Layers that also accept parameters stacked on a leading lane axis.

With weights as built they are torch's own layers. Under `functional_call` with weights [L, out, in] and inputs
[L, B, in] they compute L independent networks at once by batched products.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn


class Linear(nn.Linear):
    """x Wᵀ + b; weight [out, in] or [L, out, in], x [..., B, in].

    Lanes are computed as W xᵀ + b, with the points last in memory: the gradient of W then has the layout of W, without
    a transposed copy (wide layers and small batches train up to five times as fast).
    """

    def forward(self, x: Tensor) -> Tensor:
        if self.weight.dim() == 2:
            return super().forward(x)
        return torch.baddbmm(self.bias.unsqueeze(-1), self.weight, x.mT).mT


class BatchNorm(nn.BatchNorm1d):
    """Batch normalisation of [B, D], or of [L, B, D] with statistics of each lane's own batch.

    Running statistics are updated in place with the unbiased variance, as torch does.
    """

    def forward(self, x: Tensor) -> Tensor:
        if self.weight.dim() == 1:
            return super().forward(x)
        mean, var = self.running_mean, self.running_var
        assert mean is not None and var is not None and self.momentum is not None
        if self.training:
            batch_var, batch_mean = torch.var_mean(x, dim=-2, correction=0)
            count = x.shape[-2]
            with torch.no_grad():
                mean.lerp_(batch_mean, self.momentum)
                var.lerp_(batch_var * (count / max(count - 1, 1)), self.momentum)
                if self.num_batches_tracked is not None:
                    self.num_batches_tracked += 1
            mean, var = batch_mean, batch_var
        scale = self.weight * torch.rsqrt(var + self.eps)
        return (x - mean.unsqueeze(-2)) * scale.unsqueeze(-2) + self.bias.unsqueeze(-2)


class LayerNorm(nn.LayerNorm):
    """Layer normalisation of the last axis; scale and shift [D] or [L, D]."""

    def forward(self, x: Tensor) -> Tensor:
        if self.weight.dim() == 1:
            return super().forward(x)
        normalised = nn.functional.layer_norm(x, self.normalized_shape, None, None, self.eps)
        return normalised * self.weight.unsqueeze(-2) + self.bias.unsqueeze(-2)


class FilterResponseNorm(nn.Module):
    """y = γ x / √(mean over positions of x² + ε) + β by channel (Singh & Krishnan 2020, eq. 1-3); x [B, C, H, W]."""

    def __init__(self, channels: int, eps: float = 1e-6) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(channels))
        self.shift = nn.Parameter(torch.zeros(channels))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        power = x.square().mean(dim=(2, 3), keepdim=True)
        return x * torch.rsqrt(power + self.eps) * self.scale.view(-1, 1, 1) + self.shift.view(-1, 1, 1)


class ThresholdedLinear(nn.Module):
    """max(x, τ) with a learned τ per channel, which replaces the ReLU in filter response normalisation (eq. 4)."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.threshold = nn.Parameter(torch.zeros(channels))

    def forward(self, x: Tensor) -> Tensor:
        return torch.maximum(x, self.threshold.view(-1, 1, 1))


class StandardisedConv(nn.Module):
    """Convolution by Ŵ = √2 (W − mean W) / √(fan-in · var W), filter by filter (Qiao et al. 2019; Brock et al. 2021).

    The scale and mean of the raw weight do not matter, and a ReLU network keeps its signal without a norm layer. It is
    not an `nn.Conv2d`: its parameter is W, but it convolves with Ŵ.
    """

    def __init__(self, inputs: int, outputs: int, kernel: int, padding: int, eps: float = 1e-8) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(outputs, inputs, kernel, kernel) / (inputs * kernel**2) ** 0.5)
        self.bias = nn.Parameter(torch.zeros(outputs))
        self.padding = padding
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        var, mean = torch.var_mean(self.weight, dim=(1, 2, 3), correction=0, keepdim=True)
        fan_in = self.weight[0].numel()
        standardised = (self.weight - mean) * torch.rsqrt((var * fan_in).clamp_min(self.eps)) * 2**0.5
        return nn.functional.conv2d(x, standardised, self.bias, padding=self.padding)


def norm_layer(kind: str, channels: int, groups: int) -> nn.Module:
    """A norm for [B, C, H, W]: batch, group, layer (over all of an image: one group), filter_response or none."""
    if kind == "batch":
        return nn.BatchNorm2d(channels)
    if kind == "group":
        return nn.GroupNorm(groups, channels)
    if kind == "layer":
        return nn.GroupNorm(1, channels)
    return FilterResponseNorm(channels) if kind == "filter_response" else nn.Identity()


def rectifier(kind: str, channels: int) -> nn.Module:
    """The ReLU after a norm; with a learned threshold after filter response normalisation."""
    return ThresholdedLinear(channels) if kind == "filter_response" else nn.ReLU()


class Attention(nn.Module):
    """softmax(Q Kᵀ / √d) V in `heads` heads (Vaswani et al. 2017, §3.2); x [B, T, D].

    Uses only matrix products and a softmax: torch's own layer has a fused path without forward-mode derivatives, and
    hides its weights from hooks. `mask` [B, T] is true for tokens that count.
    """

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.heads = heads

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        batch, tokens, width = x.shape
        q, k, v = self.qkv(x).reshape(batch, tokens, 3, self.heads, -1).permute(2, 0, 3, 1, 4)  # each [B, h, T, d]
        scores = q @ k.mT * (self.heads / width) ** 0.5
        if mask is not None:  # finite, so that a row without tokens has no NaN
            scores = scores.masked_fill(~mask[:, None, None, :], torch.finfo(scores.dtype).min)
        return self.out((scores.softmax(-1) @ v).transpose(1, 2).reshape(batch, tokens, width))


class TransformerBlock(nn.Module):
    """x + attention(norm(x)), then x + mlp(norm(x)), with a GELU (pre-norm; Dosovitskiy et al. 2021, eq. 2-3)."""

    def __init__(self, width: int, heads: int, hidden: int) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(width)
        self.attention = Attention(width, heads)
        self.norm2 = nn.LayerNorm(width)
        self.fc1 = nn.Linear(width, hidden)
        self.fc2 = nn.Linear(hidden, width)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        x = x + self.attention(self.norm1(x), mask)
        return x + self.fc2(nn.functional.gelu(self.fc1(self.norm2(x))))
