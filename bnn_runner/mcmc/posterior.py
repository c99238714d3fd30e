"""The posterior that chains leave: a stored set of weight vectors, drawn from in a seeded order."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor, nn

from bnn_runner.base import FitReport, Likelihood, Network
from bnn_runner.mcmc.target import Layout, stacked_forward
from bnn_runner.models.likelihoods import Gaussian
from bnn_runner.rng import generator
from bnn_runner.runtime.torch_state import evaluation_mode
from bnn_runner.training.lanes import Tensors


@dataclass(frozen=True)
class ChainDraws:
    """S stored weight vectors [S, P], each pushed through the network at its own chain's buffers."""

    module: nn.Module
    layout: Layout
    weights: Tensor
    buffers: Tensors
    log_weights: Tensor
    likelihood: Likelihood

    @property
    def floats_per_draw(self) -> int:
        return self.layout.size

    def __len__(self) -> int:
        return len(self.weights)

    def __getitem__(self, part: slice) -> ChainDraws:
        buffers = {name: b[part] for name, b in self.buffers.items()}
        return replace(self, weights=self.weights[part], buffers=buffers, log_weights=self.log_weights[part])

    @torch.no_grad()
    def __call__(self, x: Tensor) -> Tensor:
        """[S, B, K]."""
        forward = stacked_forward(self.module, len(self), x.device)
        with evaluation_mode(self.module):
            return forward(self.layout.unflatten(self.weights), self.buffers, x.expand(len(self), *x.shape))


@dataclass(frozen=True)
class ChainPosterior:
    """L chains of M draws [L, M, P] with log weights [M] (the same for all chains).

    `draws` returns the stored draws in a random order given by the seed, so that the first n represent all chains
    over their whole length; there are at most L·M. `buffers` [L, ...] are each chain's.
    """

    module: nn.Module
    layout: Layout
    weights: Tensor
    buffers: Tensors
    log_weights: Tensor
    likelihood: Likelihood
    report: FitReport
    treatment: Mapping[str, str]
    finite: ClassVar[bool] = False

    def draws(self, num_draws: int, seed: int) -> ChainDraws:
        lanes, per_chain, _ = self.weights.shape
        order = torch.randperm(lanes * per_chain, generator=generator(seed, "stored draws"))[:num_draws]
        order = order.to(self.weights.device)
        lane, place = order // per_chain, order % per_chain
        return ChainDraws(
            self.module,
            self.layout,
            self.weights[lane, place],
            {name: b[lane] for name, b in self.buffers.items()},
            self.log_weights[place.to(self.log_weights.device)],
            self.likelihood,
        )


def treatment(network: Network, rule: str) -> dict[str, str]:
    """How every tensor was treated, in words, and what was held fixed: noise and batchnorm statistics."""
    held = ["noise held at its MAP value"] if isinstance(network.likelihood, Gaussian) else []
    if any(isinstance(m, nn.modules.batchnorm._BatchNorm) for m in network.module.modules()):
        held.append("batchnorm statistics held as at the chain's start")
    return dict.fromkeys(network.parameters, "; ".join([rule, *held]))
