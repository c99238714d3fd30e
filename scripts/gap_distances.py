"""Distances between predictive distributions at single points, for scripts/gap_methods.py."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

import bnn_runner
from bnn_runner.mcmc.posterior import ChainDraws, ChainPosterior
from bnn_runner.tasks import Task

REGIONS = {"test": "data", "ood/gap": "gap", "ood/far": "far"}
POINTS = 20  # of each region
GRID = 150  # values of y


@dataclass(frozen=True)
class Mixture:
    """Predictive mixtures of Gaussians at N points: weights [S], means [S, N], standard deviations [S or 1, N or 1]."""

    weights: Tensor
    means: Tensor
    sds: Tensor

    def moments(self) -> tuple[Tensor, Tensor]:
        """Mean and standard deviation of y at every point, [N]."""
        w = self.weights[:, None]
        mean = (w * self.means).sum(0)
        variance = (w * (self.sds.square() + (self.means - mean).square())).sum(0)
        return mean, variance.sqrt()

    def on(self, y: Tensor) -> tuple[Tensor, Tensor]:
        """CDF and density [N, G] at values y [N, G]."""
        cdf, density = torch.zeros_like(y), torch.zeros_like(y)
        sds = self.sds.expand(self.means.shape)
        for w, mean, sd in zip(self.weights, self.means, sds, strict=True):
            z = (y - mean[:, None]) / sd[:, None]
            cdf.add_(torch.special.ndtr(z), alpha=float(w))
            density.addcdiv_(torch.exp(-0.5 * z.square()), sd[:, None], value=float(w) / math.sqrt(2 * math.pi))
        return cdf, density


def distances(a: Mixture, b: Mixture) -> tuple[Tensor, Tensor]:
    """1-Wasserstein distance and total variation [N] of two predictive mixtures, by trapezoids on a grid of y."""
    low = torch.minimum(*((m.means - 6 * m.sds).min(0).values for m in (a, b)))
    high = torch.maximum(*((m.means + 6 * m.sds).max(0).values for m in (a, b)))
    y = low[:, None] + (high - low)[:, None] * torch.linspace(0, 1, GRID, dtype=torch.float64)
    (cdf_a, density_a), (cdf_b, density_b) = a.on(y), b.on(y)
    wasserstein = torch.trapezoid((cdf_a - cdf_b).abs(), y, dim=1)
    return wasserstein, 0.5 * torch.trapezoid((density_a - density_b).abs(), y, dim=1)


@dataclass(frozen=True)
class Places:
    """The points at which distributions are compared: some of each split, and all of them sorted by input."""

    chosen: Mapping[str, Tensor]
    inputs: Tensor  # [N, 1] as the network takes them
    x: Tensor  # [N] in original units
    region: Sequence[str]

    @staticmethod
    def of(task: Task) -> Places:
        chosen, inputs, region = {}, [], []
        for name, said in REGIONS.items():
            split = task.splits()[name]
            chosen[name] = torch.linspace(0, len(split) - 1, min(POINTS, len(split))).round().long()
            inputs.append(split.gather(chosen[name])[0])
            region += [said] * len(chosen[name])
        every = torch.cat(inputs)
        assert task.input_mean is not None and task.input_scale is not None
        x = (task.input_mean + task.input_scale * every)[:, 0].double()
        return Places(chosen, every, x, region)

    def mixture(self, run: bnn_runner.Run) -> Mixture:
        """What a run predicts at these points."""
        found = run.evaluation
        splits = [(found.splits[name], chosen) for name, chosen in self.chosen.items()]
        means = torch.cat([s.means[:, i, 0] for s, i in splits if s.means is not None], 1)
        sds = torch.cat(
            [
                s.variances[..., 0].expand(len(s.variances), len(s.ids))[:, i]
                for s, i in splits
                if s.variances is not None
            ],
            1,
        ).sqrt()
        weights = torch.softmax(found.log_weights.double(), 0)
        if len(weights) != len(means):
            weights = torch.full((len(means),), 1 / len(means), dtype=torch.float64)
        return Mixture(weights, means, sds)


def chain_outputs(run: bnn_runner.Run, inputs: Tensor) -> Tensor:
    """Network outputs [L, M, N] of every chain's draws, in order."""
    posterior = run.posterior
    assert isinstance(posterior, ChainPosterior)
    lanes, per_chain, _ = posterior.weights.shape
    buffers = {name: b.repeat_interleave(per_chain, 0) for name, b in posterior.buffers.items()}
    draws = ChainDraws(
        posterior.module, posterior.layout, posterior.weights.flatten(0, 1), buffers,
        posterior.log_weights.repeat(lanes), posterior.likelihood,
    )  # fmt: skip
    return draws(inputs)[..., 0].unflatten(0, (lanes, per_chain)).double()


def halves(run: bnn_runner.Run, places: Places, sds: Tensor) -> tuple[Mixture, Mixture]:
    """The predictive distributions of the first half and the second half of the chains."""
    scale, shift = run.task.target_scale.double(), run.task.target_mean.double()
    means = shift + scale * chain_outputs(run, places.inputs)
    half = len(means) // 2
    parts = [m.flatten(0, 1) for m in (means[:half], means[half:])]
    first, second = (Mixture(torch.full((len(m),), 1 / len(m), dtype=torch.float64), m, sds[:1]) for m in parts)
    return first, second
