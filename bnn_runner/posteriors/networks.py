"""Posteriors that are a set of networks (MAP, ensembles), and draws that are networks."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor, nn
from torch.func import functional_call

from bnn_runner.base import FitReport, Likelihood, Network
from bnn_runner.models.likelihoods import Categorical, Gaussian
from bnn_runner.runtime.torch_state import evaluation_mode


@dataclass(frozen=True)
class NetworkDraws:
    """The network at S weight vectors. `weights` are full tensor dictionaries.

    `log_noise` [S, K] is each draw's own log noise in regression; without it all draws use `shared`.
    """

    module: nn.Module
    weights: tuple[Mapping[str, Tensor], ...]
    log_noise: Tensor | None = None
    floats_per_draw: int = 0
    shared: Likelihood = field(default_factory=Categorical)

    @property
    def likelihood(self) -> Likelihood:
        return self.shared if self.log_noise is None else Gaussian(self.log_noise.unsqueeze(1))

    @property
    def log_weights(self) -> Tensor:
        return torch.zeros(len(self.weights))

    def __len__(self) -> int:
        return len(self.weights)

    def __getitem__(self, part: slice) -> NetworkDraws:
        log_noise = None if self.log_noise is None else self.log_noise[part]
        return replace(self, weights=self.weights[part], log_noise=log_noise)

    @torch.no_grad()
    def __call__(self, x: Tensor) -> Tensor:
        """[S, B, K]."""
        with evaluation_mode(self.module):
            return torch.stack([functional_call(self.module, dict(w), (x,)) for w in self.weights])


@dataclass(frozen=True)
class NetworkEnsemble:
    """A finite posterior of M equally weighted networks; `first_is_map` makes the first one its centre."""

    networks: tuple[Network, ...]
    report: FitReport = field(default_factory=FitReport)
    finite: bool = True
    first_is_map: bool = False

    @property
    def likelihood(self) -> Likelihood:
        """The first network's; draws have the likelihood of their own member."""
        return self.networks[0].likelihood

    @property
    def treatment(self) -> dict[str, str]:
        rule = "point estimate" if len(self.networks) == 1 else f"one estimate for each of {len(self.networks)} members"
        return dict.fromkeys(self.networks[0].parameters, rule)

    def draws(self, num_draws: int, seed: int) -> NetworkDraws:
        """All members, whatever `num_draws` is: they are the whole posterior."""
        first = self.networks[0]
        weights = tuple(n.tensors for n in self.networks)
        return NetworkDraws(first.module, weights, stacked_noise(self.networks), first.num_parameters, first.likelihood)

    @property
    def centre(self) -> Callable[[Tensor], Tensor] | None:
        """The outputs of the MAP network, where it is a member."""
        return torch.no_grad()(self.networks[0].__call__) if self.first_is_map else None


def stacked_noise(networks: Sequence[Network]) -> Tensor | None:
    """Log σ of every network [M, K]; None where the likelihood has no noise parameter."""
    rows = [n.likelihood.log_noise for n in networks if isinstance(n.likelihood, Gaussian)]
    return torch.stack(rows) if rows else None


def member_distances(networks: Sequence[Network]) -> float:
    """Mean over pairs of the relative distance |w_i − w_j| / |w_i|: 0 if two members are one network."""
    flat = [torch.cat([p.flatten() for p in n.parameters.values()]) for n in networks]
    pairs = [(a, b) for i, a in enumerate(flat) for b in flat[i + 1 :]]
    return float(torch.stack([(a - b).norm() / a.norm() for a, b in pairs]).mean()) if pairs else 0.0
