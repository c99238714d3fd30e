"""Layers that also take parameters stacked on a leading lane axis.

With weights as built they are torch's own layers. Under `functional_call` with weights
[L, out, in] and inputs [L, B, in] they serve L independent networks at once by batched products.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn


class Linear(nn.Linear):
    """x Wᵀ + b; weight [out, in] or [L, out, in], x [..., B, in]."""

    def forward(self, x: Tensor) -> Tensor:
        if self.weight.dim() == 2:
            return super().forward(x)
        return torch.baddbmm(self.bias.unsqueeze(-2), x, self.weight.mT)


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
