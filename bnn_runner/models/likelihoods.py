"""Likelihoods: log-probability, moments and the root of the output-space curvature.

All of them broadcast over leading axes, so that S draws or L lanes are scored at once. A
heteroscedastic one takes 2K outputs for K targets, and its noise is a function of the input.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal

import torch
from torch import Tensor

from bnn_runner.errors import UserError

if TYPE_CHECKING:
    from bnn_runner.base import Likelihood
    from bnn_runner.tasks import Kind, TaskSpec

Form = Literal["homoscedastic", "mean_variance", "natural"]

_LOG_2PI = math.log(2 * math.pi)


@dataclass(frozen=True)
class Categorical:
    """Softmax classes; y [B] int64, outputs [..., B, K] logits."""

    def log_prob(self, outputs: Tensor, y: Tensor) -> Tensor:
        log_probs = torch.log_softmax(outputs, dim=-1)
        return log_probs.gather(-1, y.expand(outputs.shape[:-1]).unsqueeze(-1)).squeeze(-1)

    def curvature_root(self, outputs: Tensor) -> Tensor:
        """K × (K−1) root of diag(p) − p pᵀ, which is singular (its rank is K−1).

        A = diag(√p) − p √pᵀ is a K × K root and A √p = 0, so the Householder reflection that takes
        √p to the last axis makes one column of it vanish; the others are the root.
        """
        root_p = torch.softmax(outputs, dim=-1).sqrt()
        root_p = root_p / root_p.norm(dim=-1, keepdim=True)
        square = torch.diag_embed(root_p) - root_p.square().unsqueeze(-1) * root_p.unsqueeze(-2)
        # v = √p + e_last: no cancellation, as √p ≥ 0.
        v = root_p.clone()
        v[..., -1] += 1
        reflected = square - (square @ v.unsqueeze(-1)) * v.unsqueeze(-2) / (v.square().sum(-1)[..., None, None] / 2)
        return reflected[..., :-1]


@dataclass(frozen=True)
class Gaussian:
    """Homoscedastic Gaussian; y [B, K], outputs [..., B, K]; `log_noise` is log σ, broadcast to [..., B, K]."""

    log_noise: Tensor

    def log_prob(self, outputs: Tensor, y: Tensor) -> Tensor:
        """Sum over the K outputs of log N(y_k; outputs_k, σ_k²)."""
        z = (y - outputs) * torch.exp(-self.log_noise)
        return (-0.5 * (z.square() + _LOG_2PI) - self.log_noise).sum(-1)

    def mean_variance(self, outputs: Tensor) -> tuple[Tensor, Tensor]:
        """Mean [..., B, K] and variance (broadcastable to it) of y, standardised units."""
        return outputs, torch.exp(2 * self.log_noise)

    def curvature_root(self, outputs: Tensor) -> Tensor:
        """diag(1/σ), [B, K, K], of the outputs' own type (float64 of the tangent model of a float32 network)."""
        return torch.diag_embed(torch.exp(-self.log_noise.to(outputs)).expand(outputs.shape))


@dataclass(frozen=True)
class MeanVariance:
    """Heteroscedastic Gaussian; y [B, K], outputs [..., B, 2K]: the K means, then the K numbers log σ²."""

    def log_prob(self, outputs: Tensor, y: Tensor) -> Tensor:
        """Sum over the K targets of log N(y_k; μ_k, σ_k²)."""
        mean, log_variance = outputs.chunk(2, dim=-1)
        squared = (y - mean).square() * torch.exp(-log_variance)
        return -0.5 * (squared + log_variance + _LOG_2PI).sum(-1)

    def mean_variance(self, outputs: Tensor) -> tuple[Tensor, Tensor]:
        """Mean and variance of y, [..., B, K] each, standardised units."""
        mean, log_variance = outputs.chunk(2, dim=-1)
        return mean, torch.exp(log_variance)

    def curvature_root(self, outputs: Tensor) -> Tensor:
        """diag(1/σ, √½), [B, 2K, 2K]: the Fisher's root; the Hessian in (μ, log σ²) is not positive semidefinite."""
        _, log_variance = outputs.chunk(2, dim=-1)
        flat = torch.full_like(log_variance, math.sqrt(0.5))
        return torch.diag_embed(torch.cat([torch.exp(-0.5 * log_variance), flat], dim=-1))


@dataclass(frozen=True)
class Natural:
    """Heteroscedastic Gaussian in natural parameters (Immer et al. 2023); y [B, K], outputs [..., B, 2K].

    The first K outputs are η₁ = μ/σ², the others f₂ give η₂ = −½ softplus(f₂), which is −1/(2σ²):
    log p = η₁ y + η₂ y² + η₁²/(4 η₂) + ½ log(−2 η₂) − ½ log 2π, concave in (η₁, η₂).
    """

    def log_prob(self, outputs: Tensor, y: Tensor) -> Tensor:
        """Sum over the K targets of log N(y_k; μ_k, σ_k²)."""
        mean, precision, log_precision = self._moments(outputs)
        return 0.5 * (log_precision - precision * (y - mean).square() - _LOG_2PI).sum(-1)

    def mean_variance(self, outputs: Tensor) -> tuple[Tensor, Tensor]:
        """Mean and variance of y, [..., B, K] each, standardised units."""
        mean, _, log_precision = self._moments(outputs)
        return mean, torch.exp(-log_precision)

    def curvature_root(self, outputs: Tensor) -> Tensor:
        """R [B, 2K, 2K] with R Rᵀ = Jᵀ A J, A = Cov(y, y²) the Hessian in η and J = ∂η/∂f = diag(1, −½ sigmoid(f₂)).

        A = [[σ², 2μσ²], [2μσ², 2σ⁴ + 4μ²σ²]] has the root [[σ, 0], [2μσ, √2 σ²]]. The second
        derivative of η₂ in f₂ is left out: its factor y² − E y² has mean zero (Gauss-Newton).
        """
        mean, _, log_precision = self._moments(outputs)
        sd = torch.exp(-0.5 * log_precision)
        slope = -0.5 * torch.sigmoid(outputs.chunk(2, dim=-1)[1])
        zero = torch.zeros_like(sd)
        upper = torch.cat([torch.diag_embed(sd), torch.diag_embed(zero)], dim=-1)
        lower = [torch.diag_embed(2 * slope * mean * sd), torch.diag_embed(math.sqrt(2) * slope * sd.square())]
        return torch.cat([upper, torch.cat(lower, dim=-1)], dim=-2)

    @staticmethod
    def _moments(outputs: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Mean, precision and log precision of y, [..., B, K] each."""
        eta, raw = outputs.chunk(2, dim=-1)
        precision = torch.nn.functional.softplus(raw)
        # Far below zero softplus(f) is exp(f), whose logarithm is f; computing it through softplus would underflow.
        low = raw < -20
        log_precision = torch.where(low, raw, torch.where(low, torch.ones_like(raw), precision).log())
        return eta * torch.exp(-log_precision), precision, log_precision


LEAST_NOISE = torch.finfo(torch.float32).eps
"""Of the targets' standard deviation: a smaller noise is below the rounding of a network's outputs."""
STEEP_NOISE = 1e-3
"""Of the targets' standard deviation: a smaller noise makes the likelihood so steep that it is named as the cause."""


def noise_advice(log_noise: Tensor | None) -> str:
    """What to say first where something diverged under a small noise, log σ in standardised units; else nothing."""
    smallest = math.inf if log_noise is None else float(log_noise.detach().min().exp())
    if not smallest < STEEP_NOISE:
        return ""
    return (
        f"The noise is only {smallest:.2g} of the targets' standard deviation, which makes the likelihood that steep: "
        "raise likelihood.sigma, or use likelihood.noise=learned. Otherwise: "
    )


SOURCES: dict[str, tuple[str, ...]] = {
    "homoscedastic": (),
    "mean_variance": ("nix1994", "seitzer2022"),
    "natural": ("immer2023",),
}
"""The papers of each form of the noise, as keys of `runs/citations.bib`."""


@dataclass(frozen=True)
class NoiseRule:
    """How the regression noise is determined, for every method of a comparison.

    form: homoscedastic (one noise level for each target), or a network of 2K outputs, of which half
    give the noise at each input: mean_variance (μ, log σ²) or natural (η₁, and η₂ through softplus).
    noise, for the homoscedastic form: learned: log σ is trained with the weights from the residual variance of the
    initial network; fixed: `sigma`, in the target's own units; residual: weights are trained at σ = 1
    (standardised), then σ² is the mean squared training residual.
    """

    noise: Literal["learned", "fixed", "residual"] = "learned"
    sigma: float | None = None
    form: Form = "homoscedastic"

    @property
    def cites(self) -> tuple[str, ...]:
        """BibTeX keys of the form's papers."""
        return SOURCES[self.form]

    def __post_init__(self) -> None:
        if self.form != "homoscedastic" and self.noise != "learned":
            raise UserError(
                f"likelihood.form={self.form} requires likelihood.noise=learned, since the noise is an output of the "
                f"network; got likelihood.noise={self.noise}. Use that, or likelihood.form=homoscedastic."
            )
        if self.noise == "fixed" and self.sigma is None:
            raise UserError(
                "likelihood.noise=fixed requires likelihood.sigma=VALUE, the standard deviation of the noise in the "
                "target's units."
            )
        if self.sigma is not None and not 0 < self.sigma < math.inf:
            raise UserError(f"likelihood.sigma must be positive and finite (a standard deviation); got {self.sigma}.")
        if self.noise != "fixed" and self.sigma is not None:
            raise UserError(
                f"likelihood.sigma={self.sigma} requires likelihood.noise=fixed; got likelihood.noise={self.noise}. "
                "Use "
                "that, or leave out likelihood.sigma."
            )

    def fixed_log_noise(self, target_scale: Tensor) -> Tensor:
        """Log σ of the fixed noise in standardised units, [K].

        Raises:
            UserError: next to the targets' standard deviations `target_scale` [K] the noise is lost in the rounding of
                float32 (below `LEAST_NOISE`), or they are lost in it (above 1 / `LEAST_NOISE`).
        """
        assert self.sigma is not None
        for scale in target_scale.tolist():
            if not LEAST_NOISE <= self.sigma / scale <= 1 / LEAST_NOISE:
                small = self.sigma < scale
                side, limit = ("at least", LEAST_NOISE * scale) if small else ("at most", scale / LEAST_NOISE)
                raise UserError(
                    f"likelihood.sigma must be {side} {limit:.2g}; got {self.sigma}. Networks compute in float32, "
                    f"which has no digits for both this noise and targets of standard deviation {scale:.3g}. Set "
                    f"likelihood.sigma={0.1 * scale:.2g} for a tenth of the targets' standard deviation, or "
                    "likelihood.noise=learned."
                )
        return torch.log(self.sigma / target_scale)

    def problems(self, spec: TaskSpec, predictive: str) -> list[str]:
        """Why this rule does not support that task, or a method with that predictive; empty if it does."""
        if self.form == "homoscedastic":
            return []
        if spec.kind == "classification":
            return [
                f"likelihood.form={self.form} requires a regression; data={spec.name} has classes. Use "
                "likelihood.form=homoscedastic, or another data set."
            ]
        if predictive != "draws":
            return [
                f"method.predict={predictive} does not support likelihood.form={self.form}, whose predictive is not "
                "Gaussian. Use method.predict=draws."
            ]
        return []

    def problems_by_evidence(self) -> list[str]:
        """Why the evidence cannot select the noise after training; empty if it can."""
        if self.form == "homoscedastic" and self.noise != "fixed":
            return []
        return [
            "hyper.noise=evidence requires likelihood.form=homoscedastic with a noise that is not fixed; got "
            f"likelihood.form={self.form} and likelihood.noise={self.noise}. Use hyper.noise=trained, or "
            "likelihood.noise=learned with likelihood.form=homoscedastic."
        ]

    def network_spec(self, spec: TaskSpec) -> TaskSpec:
        """The task as the network sees it: 2K outputs for K targets in the heteroscedastic forms."""
        doubled = spec.kind == "regression" and self.form != "homoscedastic"
        return replace(spec, num_outputs=2 * spec.num_outputs) if doubled else spec

    def likelihood(self, kind: Kind, log_noise: Tensor | None) -> Likelihood:
        """The likelihood of a task of that kind; `log_noise` is only required by the homoscedastic Gaussian."""
        name = "categorical" if kind == "classification" else self.form
        return named_likelihood(name, log_noise)


def named_likelihood(name: str, log_noise: Tensor | None) -> Likelihood:
    """A likelihood by the name under which it is stored. Raises `KeyError` for an unknown one."""
    if name == "homoscedastic":
        if log_noise is None:
            raise ValueError("a homoscedastic Gaussian requires log_noise")
        return Gaussian(log_noise)
    without_noise: dict[str, Likelihood] = {
        "categorical": Categorical(), "mean_variance": MeanVariance(), "natural": Natural()
    }  # fmt: skip
    return without_noise[name]


def likelihood_name(likelihood: Likelihood) -> str:
    """The name that `named_likelihood` knows it by."""
    names = {Gaussian: "homoscedastic", Categorical: "categorical", MeanVariance: "mean_variance", Natural: "natural"}
    return names[type(likelihood)]
