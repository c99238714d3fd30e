"""Batch normalisation at weights that were not trained: statistics of the clean training data at those weights."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.func import functional_call

from bnn_runner.runtime.torch_state import evaluation_mode
from bnn_runner.tasks import Split

_BATCH = 512


def batchnorm_layers(module: nn.Module) -> list[nn.modules.batchnorm._BatchNorm]:
    """The layers whose running statistics depend on the data."""
    kind = nn.modules.batchnorm._BatchNorm
    return [m for m in module.modules() if isinstance(m, kind) and m.track_running_stats]


@dataclass(frozen=True)
class CleanInputs:
    """The training inputs that statistics are computed on. They are saved as the network takes them."""

    split: Split

    def state(self) -> dict[str, Tensor]:
        return {"inputs": torch.cat([x.cpu() for x, _ in self.split.batches(_BATCH)])}

    @classmethod
    def from_state(cls, state: Mapping[str, Tensor]) -> CleanInputs:
        return cls(Split(state["inputs"], None, torch.arange(len(state["inputs"]))))


@torch.no_grad()
def recomputed(
    module: nn.Module, parameters: Mapping[str, Tensor], buffers: Mapping[str, Tensor], split: Split
) -> dict[str, Tensor]:
    """Buffers in which every running mean and variance is that of `split` under `parameters`.

    One pass in batches of nearly equal size; each statistic is their average, weighted by their number of
    points, and no point is dropped. The module's flags and momenta are restored.
    """
    fresh = {name: b.clone() for name, b in buffers.items()}
    layers = batchnorm_layers(module)
    if not layers:
        return fresh
    momenta = [layer.momentum for layer in layers]
    seen = 0
    try:
        with evaluation_mode(module):
            for layer in layers:
                layer.train()
            for rows in torch.arange(len(split)).tensor_split(math.ceil(len(split) / _BATCH)):
                seen += len(rows)
                for layer in layers:
                    layer.momentum = len(rows) / seen
                functional_call(module, {**parameters, **fresh}, (split.gather(rows)[0],))
    finally:
        for layer, momentum in zip(layers, momenta, strict=True):
            layer.momentum = momentum
    return fresh
