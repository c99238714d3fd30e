"""A weighted mixture of posteriors, one for each of M trained networks: its draws, moments, and weights by validation.

Each draw comes from the component that is furthest behind its share of the draws so far. So all draws count
equally, draws are nested whatever their number, and components of equal weight take turns.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from bnn_runner.base import Draws, FitReport, Likelihood, Moments, Posterior, centre_of
from bnn_runner.models.likelihoods import Gaussian
from bnn_runner.rng import derive_seed
from bnn_runner.tasks import Split

WEIGHTING_DRAWS = 200
"""Draws of each component for its predictive density of the validation points."""


@dataclass(frozen=True)
class MixtureDraws:
    """Consecutive draws: `owners` [S] are their components, and parts[m] the draws of component m, in order."""

    parts: tuple[Draws, ...]
    owners: Tensor

    def __len__(self) -> int:
        return len(self.owners)

    @property
    def floats_per_draw(self) -> int:
        return max(part.floats_per_draw for part in self.parts)

    @property
    def log_weights(self) -> Tensor:
        return torch.zeros(len(self))

    @property
    def likelihood(self) -> Likelihood:
        """With each component's own noise, [S, 1, K], in regression; else the likelihood that all share."""
        own = [part.likelihood for part in self.parts]
        noises = [likelihood.log_noise for likelihood in own if isinstance(likelihood, Gaussian)]
        if len(noises) < len(own):
            return own[0]
        return Gaussian(torch.stack(noises)[self.owners.to(noises[0].device)].unsqueeze(1))

    def __getitem__(self, part: slice) -> MixtureDraws:
        begin, end, step = part.indices(len(self))
        if step != 1:
            raise ValueError("a slice of draws must have step 1")
        end = max(begin, end)

        def before(m: int, bound: int) -> int:
            return int((self.owners[:bound] == m).sum())

        parts = tuple(p[before(m, begin) : before(m, end)] for m, p in enumerate(self.parts))
        return MixtureDraws(parts, self.owners[begin:end])

    def __call__(self, x: Tensor) -> Tensor:
        """[S, B, K]."""
        found = {m: part(x) for m, part in enumerate(self.parts) if len(part)}
        some = next(iter(found.values()))
        outputs = some.new_empty(len(self), *some.shape[1:])
        for m, values in found.items():
            outputs[(self.owners == m).to(some.device)] = values
        return outputs


def owners(weights: Tensor, num_draws: int) -> Tensor:
    """The component of each draw, [S]: always the one furthest behind its share.

    >>> owners(torch.tensor([0.5, 0.25, 0.25]), 8).tolist()
    [0, 1, 2, 0, 0, 1, 2, 0]
    """
    shares = weights.double().cpu()
    counts, found = torch.zeros_like(shares), []
    for s in range(num_draws):
        m = int((shares * (s + 1) - counts).argmax())
        counts[m] += 1
        found.append(m)
    return torch.tensor(found, dtype=torch.int64)


@dataclass(frozen=True)
class Mixture:
    """Σ_m w_m q_m over functions; `weights` [M] sum to one.

    Its `moments` are exact where every component has moments. It is not Gaussian, so it has neither a
    closed-form predictive nor a Gaussian joint; it is scored by its draws.
    """

    components: tuple[Posterior, ...]
    weights: Tensor
    report: FitReport = field(default_factory=FitReport)
    treatment: Mapping[str, str] = field(default_factory=dict)
    finite: bool = False

    @property
    def likelihood(self) -> Likelihood:
        """The first component's; draws have the likelihood of their own component."""
        return self.components[0].likelihood

    def draws(self, num_draws: int, seed: int) -> MixtureDraws:
        turns = owners(self.weights, num_draws)
        parts = tuple(
            component.draws(int((turns == m).sum()), derive_seed(seed, "mixture", m))
            for m, component in enumerate(self.components)
        )
        return MixtureDraws(parts, turns)

    @property
    def centre(self) -> Callable[[Tensor], Tensor] | None:
        """The first component's centre: in an ensemble of trained networks the MAP network's outputs."""
        return centre_of(self.components[0])

    def moments(self, x: Tensor) -> Moments:
        """Mean Σ w_m μ_m [B, K] and covariance Σ w_m (C_m + μ_m μ_mᵀ) − μ μᵀ [B, K, K] of the outputs.

        Raises:
            AttributeError: a component has no moments.
        """
        found = [component.moments(x) for component in self.components]  # type: ignore[attr-defined]
        means, covariances = torch.stack([m.mean for m in found]), torch.stack([m.covariance for m in found])
        weights = self.weights.to(means).view(-1, 1, 1)
        mean = (weights * means).sum(0)
        apart = means - mean
        second = covariances + apart.unsqueeze(-1) * apart.unsqueeze(-2)
        return Moments(mean, (weights.unsqueeze(-1) * second).sum(0))


def stacking_weights(log_densities: Tensor, steps: int = 10_000, tolerance: float = 1e-9) -> Tensor:
    """The weights that maximise Σ_n log Σ_m w_m p_m(y_n) over the simplex, from log p_m(y_n) [M, N]: [M], float64.

    The objective is concave; expectation-maximisation climbs it until no weight changes by `tolerance`.

    >>> stacking_weights(torch.tensor([[0.0, 0.0, -9.0], [-9.0, -9.0, 0.0]])).round(decimals=3).tolist()
    [0.667, 0.333]
    """
    logs = log_densities.double()
    weights = torch.full((len(logs),), 1 / len(logs), dtype=torch.float64, device=logs.device)
    for _ in range(steps):
        moved = torch.softmax(weights.log().unsqueeze(1) + logs, 0).mean(1)
        change = float((moved - weights).abs().max())
        weights = moved
        if change < tolerance:
            break
    return weights


@torch.no_grad()
def predictive_log_densities(components: Sequence[Posterior], split: Split, seed: int, batch_size: int) -> Tensor:
    """Log p_m(y_n) [M, N] of each component, standardised units: log mean over `WEIGHTING_DRAWS` draws."""
    rows = []
    for m, component in enumerate(components):
        draws = component.draws(WEIGHTING_DRAWS, derive_seed(seed, "mixture weights", m))
        parts = []
        for x, y in split.batches(batch_size):
            assert y is not None
            logs = draws.likelihood.log_prob(draws(x), y).double()
            parts.append(torch.logsumexp(logs, 0) - math.log(len(draws)))
        rows.append(torch.cat(parts))
    return torch.stack(rows)
