"""A factorised Gaussian over a network's weights, its draws, and its pruned versions."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from bnn_runner.base import FitReport, Likelihood, Network
from bnn_runner.posteriors.networks import NetworkDraws
from bnn_runner.rng import generator


@dataclass(frozen=True)
class MeanField:
    """q(w) = Π N(μ, σ²): `network` holds the means μ, `sigmas` maps names to σ; other tensors are point estimates.

    Draw s is the network at μ + σ ε_s, with ε_s from the stream (seed, s). All draws use the network's own buffers
    (batchnorm statistics).
    """

    network: Network
    sigmas: Mapping[str, Tensor]
    report: FitReport = field(default_factory=FitReport)
    treatment: Mapping[str, str] = field(default_factory=dict)
    finite: bool = False

    @property
    def likelihood(self) -> Likelihood:
        return self.network.likelihood

    def draws(self, num_draws: int, seed: int) -> MeanFieldDraws:
        return MeanFieldDraws(self, seed, 0, num_draws)

    def centre(self, x: Tensor) -> Tensor:
        """Outputs [B, K] of the network at the means μ."""
        with torch.no_grad():
            return self.network(x)

    def weights(self, s: int, seed: int) -> dict[str, Tensor]:
        """Parameters and buffers of draw s."""
        stream = generator(seed, "mean-field draw", s)
        drawn = {}
        for name, sigma in self.sigmas.items():
            mu = self.network.parameters[name]
            eps = torch.randn(mu.shape, generator=stream, dtype=mu.dtype).to(mu.device)
            drawn[name] = torch.addcmul(mu, sigma, eps)
        return self.network.tensors | drawn

    def signal_to_noise(self) -> Tensor:
        """|μ|/σ of every weight that has a σ, [P] (Blundell et al. 2015, §5.2)."""
        ratios = [(self.network.parameters[n].abs() / s).flatten() for n, s in self.sigmas.items()]
        return torch.cat(ratios)

    def pruned(self, fraction: float) -> MeanField:
        """Without the `fraction` of weights with the lowest |μ|/σ: their mean and standard deviation are zero."""
        order = torch.argsort(self.signal_to_noise(), stable=True)
        keep = torch.ones(len(order), dtype=torch.bool, device=order.device)
        keep[order[: round(fraction * len(order))]] = False
        parts = keep.split([s.numel() for s in self.sigmas.values()])
        kept = {n: part.view_as(s) for (n, s), part in zip(self.sigmas.items(), parts, strict=True)}
        means = {n: self.network.parameters[n] * k for n, k in kept.items()}
        network = replace(self.network, parameters=self.network.parameters | means)
        return replace(self, network=network, sigmas={n: s * kept[n] for n, s in self.sigmas.items()})


@dataclass(frozen=True)
class MeanFieldDraws:
    """Draws `first` to `last`. Weights are drawn when first used, so that a chunk holds few at once."""

    posterior: MeanField
    seed: int
    first: int
    last: int
    _kept: list[NetworkDraws] = field(default_factory=list, repr=False)

    @property
    def likelihood(self) -> Likelihood:
        return self.posterior.likelihood

    @property
    def log_weights(self) -> Tensor:
        return torch.zeros(len(self))

    @property
    def floats_per_draw(self) -> int:
        return self.posterior.network.num_parameters

    def __len__(self) -> int:
        return self.last - self.first

    def __getitem__(self, part: slice) -> MeanFieldDraws:
        begin, end, _ = part.indices(len(self))
        return MeanFieldDraws(self.posterior, self.seed, self.first + begin, self.first + max(begin, end))

    def __call__(self, x: Tensor) -> Tensor:
        """[S, B, K]."""
        if not self._kept:
            weights = tuple(self.posterior.weights(s, self.seed) for s in range(self.first, self.last))
            self._kept.append(NetworkDraws(self.posterior.network.module, weights))
        return self._kept[0](x)
