"""The linearised Laplace posterior: Gaussian weights propagated through the tangent model.

A draw is the function f(x, w*) + J(x) δ_s with δ_s ~ N(0, Σ), the same δ_s for every x.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Literal

import torch
from torch import Tensor

from bnn_runner.base import FitReport, Likelihood, Moments
from bnn_runner.curvature.base import WeightGaussian
from bnn_runner.curvature.jacobians import Jacobians
from bnn_runner.curvature.psd import wide
from bnn_runner.posteriors.networks import NetworkDraws
from bnn_runner.runtime.memory import halving, memory_limit
from bnn_runner.runtime.torch_state import true_float32
from bnn_runner.tasks import Split


@dataclass(frozen=True)
class LinearisedDraws:
    """Draws `start` to `stop` of the tangent model. Weights are sampled when first used, then kept."""

    jacobians: Jacobians
    gaussian: WeightGaussian
    seed: int
    start: int
    stop: int
    _kept: dict[str, Tensor] = field(default_factory=dict, repr=False)

    @property
    def likelihood(self) -> Likelihood:
        return self.jacobians.network.likelihood

    @property
    def log_weights(self) -> Tensor:
        return torch.zeros(len(self))

    @property
    def floats_per_draw(self) -> int:
        return sum(self.jacobians.sizes().values())

    def __len__(self) -> int:
        return self.stop - self.start

    def __getitem__(self, part: slice) -> LinearisedDraws:
        begin, end = _bounds(part, len(self))
        return replace(self, start=self.start + begin, stop=self.start + end, _kept={})

    def _deltas(self) -> dict[str, Tensor]:
        if not self._kept:
            flat = self.gaussian.sample(self.seed, self.start, self.stop)
            sizes, device = self.jacobians.sizes(), next(iter(self.jacobians.network.parameters.values())).device
            self._kept.update(
                zip(sizes, (p.contiguous().to(device) for p in flat.split(list(sizes.values()), dim=1)), strict=True)
            )
        return self._kept

    def __call__(self, x: Tensor) -> Tensor:
        """[S, B, K]. Cost: K backward passes per batch, independent of S, and at most S·P·B·K multiplications."""
        with torch.no_grad(), true_float32():
            return halving(lambda: self._moved(x), self.jacobians.halve)

    def _moved(self, x: Tensor) -> Tensor:
        deltas, parts = self._deltas(), []
        for piece in x.split(self.jacobians.batch_size(self._num_outputs(x), use=len(self))):
            batch = self.jacobians(piece)
            moved = batch.outputs.unsqueeze(-1).repeat(1, 1, len(self))  # [B, K, S]
            for name, jacobian in batch.tensors.items():
                moved += jacobian.apply(deltas[name])
            parts.append(moved)
        return torch.cat(parts).permute(2, 0, 1)

    def _num_outputs(self, x: Tensor) -> int:
        return int(self.jacobians.network(x[:1]).shape[-1])


@dataclass(frozen=True)
class SampledNetworks:
    """Draws `start` to `stop`: the network at w* + δ_s. Weights are sampled when first used, so chunks hold few.

    Buffers (running statistics) are those of w*.
    """

    jacobians: Jacobians
    gaussian: WeightGaussian
    seed: int
    start: int
    stop: int
    _kept: list[NetworkDraws] = field(default_factory=list, repr=False)

    @property
    def likelihood(self) -> Likelihood:
        return self.jacobians.network.likelihood

    @property
    def log_weights(self) -> Tensor:
        return torch.zeros(len(self))

    @property
    def floats_per_draw(self) -> int:
        return self.jacobians.network.num_parameters

    def __len__(self) -> int:
        return self.stop - self.start

    def __getitem__(self, part: slice) -> SampledNetworks:
        begin, end = _bounds(part, len(self))
        return replace(self, start=self.start + begin, stop=self.start + end, _kept=[])

    def __call__(self, x: Tensor) -> Tensor:
        """[S, B, K]."""
        if not self._kept:
            rows = self.gaussian.sample(self.seed, self.start, self.stop)
            weights = tuple(self.jacobians.moved(row) for row in rows)
            self._kept.append(NetworkDraws(self.jacobians.network.module, weights))
        return self._kept[0](x)


def _bounds(part: slice, length: int) -> tuple[int, int]:
    """First and last (exclusive) of a slice of draws, which has step 1."""
    begin, end, step = part.indices(length)
    if step != 1:
        raise ValueError("a slice of draws must have step 1")
    return begin, max(begin, end)


@dataclass(frozen=True)
class NetworkLaplace:
    """q(w) = N(w*, (H + Λ)⁻¹) through the network itself; for comparison, known to do worse (Immer et al. 2021).

    It has no output moments in closed form.
    """

    jacobians: Jacobians
    gaussian: WeightGaussian
    likelihood: Likelihood
    report: FitReport
    treatment: Mapping[str, str]
    finite: bool = False

    def draws(self, num_draws: int, seed: int) -> SampledNetworks:
        return SampledNetworks(self.jacobians, self.gaussian, seed, 0, num_draws)

    def centre(self, x: Tensor) -> Tensor:
        """f(x, w*) [B, K]: the MAP network's outputs, which are not the mean of the draws."""
        with torch.no_grad():
            return self.jacobians.network(x)


@dataclass(frozen=True)
class SampledLaplace:
    """q(w) = N(w*, (H + Λ)⁻¹) given by draws only, through the tangent model; without moments in closed form."""

    jacobians: Jacobians
    gaussian: WeightGaussian
    likelihood: Likelihood
    report: FitReport
    treatment: Mapping[str, str]
    finite: bool = False

    def draws(self, num_draws: int, seed: int) -> LinearisedDraws:
        return LinearisedDraws(self.jacobians, self.gaussian, seed, 0, num_draws)

    def centre(self, x: Tensor) -> Tensor:
        """f(x, w*) [B, K], the mean of the draws: the MAP network's own outputs."""
        with torch.no_grad():
            return self.jacobians.network(x)


@dataclass(frozen=True)
class LinearisedLaplace:
    """q(w) = N(w*, (H + Λ)⁻¹) through the tangent model."""

    jacobians: Jacobians
    gaussian: WeightGaussian
    likelihood: Likelihood
    report: FitReport
    treatment: Mapping[str, str]
    finite: bool = False

    def draws(self, num_draws: int, seed: int) -> LinearisedDraws:
        return LinearisedDraws(self.jacobians, self.gaussian, seed, 0, num_draws)

    def centre(self, x: Tensor) -> Tensor:
        """f(x, w*) [B, K], the mean of the draws: the MAP network's own outputs."""
        with torch.no_grad():
            return self.jacobians.network(x)

    def moments(self, x: Tensor) -> Moments:
        """Mean f(x, w*) [B, K] and covariance J Σ Jᵀ [B, K, K] of the outputs."""
        with true_float32():
            return halving(lambda: self._moments(x), self.jacobians.halve)

    def _moments(self, x: Tensor) -> Moments:
        means, covariances = [], []
        # Blocks form the dense Jacobian of a layer a few points at a time; the others need it of the whole batch.
        use: Literal["any", "factors"] = "factors" if getattr(self.gaussian, "uses_factors", False) else "any"
        with torch.no_grad():
            num_outputs = int(self.jacobians.network(x[:1]).shape[-1])
            for piece in x.split(self.jacobians.batch_size(num_outputs, use=use)):
                batch = self.jacobians(piece)
                means.append(batch.outputs)
                covariances.append(self.gaussian.covariance(batch).to(batch.outputs))
        return Moments(torch.cat(means), torch.cat(covariances))

    def joint_covariance(self, split: Split) -> Tensor:
        """Covariance [N·K, N·K] of the outputs at all points, float64. It needs memory for N·K·P numbers.

        Raises:
            RunFailed: that is more than the memory limit.
        """
        rows: list[Tensor] = []
        weights = sum(self.jacobians.sizes().values())
        outputs = len(split) * self.centre(split.gather(torch.arange(1))[0]).shape[-1]
        memory_limit().reserve(
            f"the joint covariance of {outputs:,} outputs over {weights:,} weights",
            2 * 8 * outputs * weights,
            "Use fewer test points (data.test_size), or method.weights=last_layer.",
        )
        with torch.no_grad(), true_float32():
            for x, _ in split.batches(64):
                root = wide(self.gaussian.covariance_root(self.jacobians(x)))  # [B, K, R]
                rows.append(root.flatten(0, 1))
        stacked = torch.cat(rows)
        return stacked @ stacked.T
