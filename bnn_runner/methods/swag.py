"""SWAG and multi-SWAG (Maddox et al. 2019; Wilson & Izmailov 2020): Gaussians fitted to the path of SGD."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import ClassVar, Literal

import torch
from torch import Tensor

from bnn_runner.base import FitContext, FitReport, HyperRule, Likelihood, Network, Predictive, TrainingSpec
from bnn_runner.curvature.sharpness import sharpness
from bnn_runner.errors import raise_all
from bnn_runner.posteriors.batchnorm import CleanInputs, batchnorm_layers, recomputed
from bnn_runner.posteriors.function_diversity import diversity_notes, function_diversity, probe_points
from bnn_runner.posteriors.networks import NetworkDraws, stacked_noise
from bnn_runner.posteriors.swag_moments import PathMoments, Phase, collect
from bnn_runner.rng import generator
from bnn_runner.tasks import Task, TaskSpec
from bnn_runner.training.schedules import Schedule

DIVERSITY_DRAWS = 8
"""Draws for the function diversity; with batchnorm each costs a pass over the training data."""


@dataclass(frozen=True)
class SWAGPosterior:
    """The equal mixture, over members, of N(mean, scale (diag(variance) + D Dᵀ/(R−1))).

    Its draw s is member s mod M at θ = mean + √scale (√variance z₁ + D z₂/√(R−1)), z standard
    normal; D [P, R] holds the last R deviations (without any, the second term is absent). For R > 1
    Maddox et al. use scale ½, so that the diagonal and the low-rank part each count half. `clean` is
    the data for batchnorm statistics, where the network has any.
    """

    networks: tuple[Network, ...]
    members: tuple[PathMoments, ...]
    scale: float
    clean: CleanInputs | None
    report: FitReport = field(default_factory=FitReport)
    treatment: Mapping[str, str] = field(default_factory=dict)
    finite: bool = False

    @property
    def likelihood(self) -> Likelihood:
        """The first member's; draws have the likelihood of their own member."""
        return self.networks[0].likelihood

    def draws(self, num_draws: int, seed: int) -> SWAGDraws:
        return SWAGDraws(self, seed, 0, num_draws)

    def centre(self, x: Tensor) -> Tensor:
        """Outputs [B, K] of the network at the first member's mean weights (SWA, Izmailov et al. 2018)."""
        return self._centre(x)[0]

    @cached_property
    def _centre(self) -> NetworkDraws:
        return NetworkDraws(self.networks[0].module, (self.full(self.networks[0], self.members[0].mean),))

    def full(self, owner: Network, weights: Tensor) -> dict[str, Tensor]:
        """Parameters and buffers of a member at `weights` [P]; with batchnorm, statistics of the data at them."""
        pieces = weights.split([p.numel() for p in owner.parameters.values()])
        parameters = {n: w.view_as(p) for (n, p), w in zip(owner.parameters.items(), pieces, strict=True)}
        buffers = owner.buffers
        if self.clean is not None:
            buffers = recomputed(owner.module, parameters, buffers, self.clean.split)
        return {**parameters, **buffers}

    def weights(self, s: int, seed: int) -> Tensor:
        """θ of draw s, [P]."""
        member = self.members[s % len(self.members)]
        random = generator(seed, "swag", s)
        mean, rank = member.mean, len(member.deviations)
        z1 = torch.randn(len(mean), generator=random).to(mean)
        step = (member.squares / member.count).sqrt() * z1
        if rank > 1:
            z2 = torch.randn(rank, generator=random).to(mean) / math.sqrt(rank - 1)
            step = step + z2 @ torch.stack(member.deviations)
        return mean + math.sqrt(self.scale) * step


@dataclass(frozen=True)
class SWAGDraws:
    """Draws first … last − 1. Weights, and batchnorm statistics at them, are computed once, when first called."""

    posterior: SWAGPosterior
    seed: int
    first: int
    last: int

    @property
    def log_weights(self) -> Tensor:
        return torch.zeros(len(self))

    @property
    def floats_per_draw(self) -> int:
        return self.posterior.networks[0].num_parameters

    @property
    def likelihood(self) -> Likelihood:
        return self._networks.likelihood

    def __len__(self) -> int:
        return self.last - self.first

    def __getitem__(self, part: slice) -> SWAGDraws:
        a, b, _ = part.indices(len(self))
        return SWAGDraws(self.posterior, self.seed, self.first + a, self.first + max(a, b))

    def __call__(self, x: Tensor) -> Tensor:
        return self._networks(x)

    @cached_property
    def _networks(self) -> NetworkDraws:
        posterior = self.posterior
        owners = [posterior.networks[s % len(posterior.networks)] for s in range(self.first, self.last)]
        full = tuple(posterior.full(o, posterior.weights(s, self.seed)) for s, o in enumerate(owners, self.first))
        noise, first = stacked_noise(owners), owners[0]
        return NetworkDraws(first.module, full, noise, self.floats_per_draw, first.likelihood)


@dataclass(frozen=True)
class SWAG:
    """A Gaussian around the path of SGD that continues from the MAP network at a constant learning rate.

    Attributes:
        size: independent members; more than one is multi-SWAG.
        structure: low_rank (diagonal and the last `rank` deviations) or diag.
        epochs: of the collection, with the batch size of the schedule.
        lr: of the collection; None is 1 over the loss's largest curvature at the MAP weights, about a quarter of the
            largest stable rate under momentum 0.9.
        momentum: of the collection.
        collect_every: epochs between two collected weight vectors.
        rank: number of deviations.
        scale: of the covariance; None is ½ for low_rank and 1 for diag, the convention of Maddox et al.
    """

    size: int = 1
    structure: Literal["low_rank", "diag"] = "low_rank"
    epochs: int = 40
    lr: float | None = None
    momentum: float = 0.9
    collect_every: int = 1
    rank: int = 20
    scale: float | None = None
    finite: ClassVar[bool] = False
    uses_hyper: ClassVar[bool] = False
    predictive: ClassVar[Predictive] = "draws"
    cites: ClassVar[tuple[str, ...]] = ("maddox2019", "wilson2020")

    def __post_init__(self) -> None:
        problems = []
        if self.size < 1:
            problems.append(f"method.size must be at least 1; got {self.size}.")
        if self.collect_every < 1 or self.epochs < 2 * self.collect_every:
            problems.append(
                "method.epochs must be at least 2 method.collect_every, so that two weight vectors are collected; got "
                f"epochs={self.epochs} and collect_every={self.collect_every}."
            )
        if self.lr is not None and not 0 < self.lr < math.inf:
            problems.append(f"method.lr must be positive and finite, or null; got {self.lr}.")
        if not 0 <= self.momentum < 1:
            problems.append(f"method.momentum must be in [0, 1); got {self.momentum}.")
        if self.rank < 2:
            problems.append(f"method.rank must be at least 2; got {self.rank}. method.structure=diag uses none.")
        if self.scale is not None and not 0 < self.scale < math.inf:
            problems.append(f"method.scale must be positive and finite, or null; got {self.scale}.")
        raise_all(problems)

    def problems(self, spec: TaskSpec, hyper: HyperRule | None) -> list[str]:
        return []

    def needs(self) -> list[TrainingSpec]:
        return [TrainingSpec(member) for member in range(self.size)]

    def own_epochs(self, schedule: Schedule) -> int:
        """Of the collection."""
        return self.epochs

    def fit(self, task: Task, networks: Sequence[Network], context: FitContext) -> SWAGPosterior:
        low_rank = self.structure == "low_rank"
        lr = self.lr
        if lr is None:
            lr = 1 / max(1e-12, *(sharpness(network, task) for network in networks))
        phase = Phase(self.epochs, self.collect_every, lr, self.momentum, self.rank if low_rank else 0)
        members = tuple(collect(task, networks, phase, context))
        rank = len(members[0].deviations)
        scale = self.scale if self.scale is not None else (0.5 if low_rank else 1.0)
        rule = f"SWAG, diagonal and rank {rank}" if low_rank else "SWAG, diagonal"
        flat = [torch.cat([p.flatten() for p in n.parameters.values()]) for n in networks]
        moved = [float((m.mean - w).norm() / w.norm()) for m, w in zip(members, flat, strict=True)]
        facts = {
            "members": len(members),
            "collected": members[0].count,
            "rank": rank,
            "scale": scale,
            "lr": lr,
            "gradient_noise": len(task.train) > context.schedule.batch_size,
            "mean_moved": sum(moved) / len(moved),
            "weight_sd": float(torch.stack([(m.squares / m.count).mean() for m in members]).mean().sqrt()),
        }
        notes = []
        clean = None
        if batchnorm_layers(networks[0].module):
            clean = CleanInputs(task.train)
            notes.append(
                f"batchnorm statistics are recomputed for every draw on the {len(task.train)} clean training points"
            )
        if len(task.train) <= context.schedule.batch_size:
            notes.append(
                f"all {len(task.train)} points are in one batch, so the path has no gradient noise and its variance is "
                "only its drift; lower schedule.batch_size"
            )
        treatment = dict.fromkeys(networks[0].parameters, f"{rule}, covariance times {scale:g}")
        posterior = SWAGPosterior(tuple(networks), members, scale, clean, treatment=treatment)
        x = probe_points(task.test, next(iter(networks[0].parameters.values())).dtype)
        diversity = function_diversity(posterior.draws(DIVERSITY_DRAWS, context.seed)(x), posterior.likelihood)
        advice = "Raise method.lr, or lower schedule.batch_size, for more gradient noise."
        notes += diversity_notes(diversity, posterior.likelihood, "the path of SGD has", advice)
        return replace(posterior, report=FitReport({**facts, "function_diversity": diversity}, tuple(notes)))
