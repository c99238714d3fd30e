"""Curvature of −log p in the outputs, as a root R_n [K, C] with R_n R_nᵀ = B_n (or an estimate of it).

The curvature of the weights is then Σ_n J_nᵀ R_n R_nᵀ J_n, for any of these roots:

- ggn: the exact B_n = −∂² log p / ∂f², from the likelihood (K or K − 1 columns).
- mc_fisher: M columns g(y_m)/√M with y_m ~ p(y | f_n) and g the score ∂ log p / ∂f; its expectation is
  the Fisher, which equals B_n for these likelihoods (Kunstner et al. 2019). M backward passes
  per batch instead of K make many classes affordable.
- empirical_fisher: one column g(y_n) at the observed target. Cheap, but not an estimate of B_n.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, Protocol, cast

import torch
from torch import Tensor

from bnn_runner.base import Likelihood, Network
from bnn_runner.models.likelihoods import Categorical
from bnn_runner.rng import generator
from bnn_runner.tasks import Task

OutputCurvatureKind = Literal["ggn", "mc_fisher", "empirical_fisher"]


def samples_problems(kind: OutputCurvatureKind, samples: int) -> list[str]:
    """What is wrong with `method.fisher_samples`, or why it would be ignored."""
    if samples < 1:
        return [f"method.fisher_samples must be at least 1; got {samples}."]
    if samples > 1 and kind != "mc_fisher":
        return [
            f"method.fisher_samples={samples} requires method.curvature=mc_fisher; got {kind}. "
            "Set method.curvature=mc_fisher, or remove method.fisher_samples."
        ]
    return []


class _MeanVariance(Protocol):
    def mean_variance(self, outputs: Tensor) -> tuple[Tensor, Tensor]: ...


@dataclass(frozen=True)
class OutputCurvature:
    """Which root is used; `samples` is M of the Monte Carlo Fisher, drawn once per point from `seed`."""

    kind: OutputCurvatureKind = "ggn"
    samples: int = 1
    seed: int = 0

    def columns(self, task: Task, network: Network) -> int:
        """C, the number of backward passes per batch."""
        if self.kind == "ggn":
            x, _ = task.train.gather(torch.arange(1))
            return int(network.likelihood.curvature_root(network(x)).shape[-1])
        return self.samples if self.kind == "mc_fisher" else 1

    def uniforms(self, task: Task) -> Tensor | None:
        """Numbers in (0, 1), [N, M, K or 1], for the sampled targets: the same for any batch size."""
        if self.kind != "mc_fisher":
            return None
        width = 1 if task.spec.kind == "classification" else task.spec.num_outputs
        shape = (len(task.train), self.samples, width)
        tiny = torch.finfo(torch.float64).tiny
        return torch.rand(shape, generator=generator(self.seed, "fisher"), dtype=torch.float64).clamp_min(tiny)

    def root(self, likelihood: Likelihood, outputs: Tensor, y: Tensor, uniforms: Tensor | None) -> Tensor:
        """R [B, K, C] at outputs [B, K] and targets y; `uniforms` [B, M, ·] belong to these points."""
        if self.kind == "ggn":
            return likelihood.curvature_root(outputs)
        if uniforms is None:
            return _score(likelihood, outputs, y).unsqueeze(-1)
        copies = outputs.expand(uniforms.shape[1], *outputs.shape)  # [M, B, K]
        scores = _score(likelihood, copies, _sampled(likelihood, copies, uniforms.transpose(0, 1)))
        return scores.movedim(0, -1) / len(copies) ** 0.5


def _score(likelihood: Likelihood, outputs: Tensor, y: Tensor) -> Tensor:
    """∂ log p(y_b | f_b) / ∂f_b, of the shape of `outputs` [..., B, K]."""
    with torch.enable_grad():
        at = outputs.detach().requires_grad_()
        (score,) = torch.autograd.grad(likelihood.log_prob(at, y).sum(), at)
    return score


def _sampled(likelihood: Likelihood, outputs: Tensor, u: Tensor) -> Tensor:
    """Targets ~ p(y | outputs [..., B, K]) by the inverse distribution function at u [..., B, K or 1]."""
    u = u.to(outputs.device)
    if isinstance(likelihood, Categorical):
        below = torch.softmax(outputs.to(u.dtype), dim=-1).cumsum(-1)[..., :-1] < u
        return below.sum(-1)
    mean, variance = cast(_MeanVariance, likelihood).mean_variance(outputs)
    return mean + variance.sqrt() * torch.special.ndtri(u).to(mean)
