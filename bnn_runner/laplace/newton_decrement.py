"""The Newton decrement: how far the trained weights are from the optimum at which Laplace assumes them."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.func import functional_call

from bnn_runner.base import Network
from bnn_runner.curvature.base import WeightGaussian
from bnn_runner.curvature.jacobians import Jacobians
from bnn_runner.curvature.psd import wide
from bnn_runner.runtime.torch_state import evaluation_mode
from bnn_runner.tasks import Task

FAR_NATS, FAR_SHARE = 1.0, 0.01
"""Decrements above 1 nat and a hundredth of the effective dimension γ are far from the optimum (see `far`)."""


def far(dimension: float) -> float:
    """The decrement in nats above which w* is too far from v* to choose precisions at it: max(1, γ/100).

    The evidence is stationary where λ‖v‖² = γ. With Δ the decrement, ‖w* − v*‖²_Λ ≤ 2Δ (exact for Gaussian noise), so
    λ‖w*‖² differs from λ‖v*‖² by at most 2√(2Δγ) + 2Δ: up to Δ = γ/100, λ is off by less than a third. Below 1 nat
    it is negligible as evidence, too.
    """
    return max(FAR_NATS, FAR_SHARE * dimension)


def loss_gradient(task: Task, network: Network, names: Sequence[str], batch_size: int = 512) -> dict[str, Tensor]:
    """∂/∂w of Σ_n −log p(y_n | f(x_n, w)) at w*, evaluation mode, for the tensors `names`; float64."""
    totals = {name: torch.zeros_like(wide(network.parameters[name])) for name in names}
    with torch.enable_grad(), evaluation_mode(network.module):
        for x, y in task.train.batches(batch_size):
            moved = {name: network.parameters[name].detach().requires_grad_() for name in names}
            outputs = functional_call(network.module, network.tensors | moved, (x,))
            assert y is not None
            loss = -network.likelihood.log_prob(outputs, y).sum()
            grads = torch.autograd.grad(loss, list(moved.values()), allow_unused=True)
            for name, grad in zip(names, grads, strict=True):
                if grad is not None:
                    totals[name] += wide(grad)
    return totals


def decrement_notes(decrement: float, mode: str) -> list[str]:
    """A note on weights further than `FAR_NATS` from the optimum, where the evidence is taken at them."""
    if decrement <= FAR_NATS or mode != "network":
        return []
    return [
        f"the trained weights are {decrement:.2g} nats (Newton decrement) from the optimum of the log posterior under "
        "the selected precision, because of short training, another precision or normalisation layers. The evidence is "
        "that of these weights; method.mode=tangent takes that of the tangent model's optimum"
    ]


def newton_decrement(task: Task, jacobians: Jacobians, prior: Tensor, gaussian: WeightGaussian) -> float:
    """½ gᵀ Σ g in nats, with g = ∂/∂w [Σ_n −log p + ½ wᵀΛw] at w* over the basis and Σ = (H + Λ)⁻¹ as fitted.

    `prior` [P] is the diagonal of Λ. To second order, the decrement is what the log posterior would gain at its
    optimum. It is zero at a MAP estimate under the same prior.
    """
    network = jacobians.network
    gradient = loss_gradient(task, network, jacobians.names)
    weights = torch.cat([jacobians.part(name, wide(network.parameters[name])) for name in jacobians.names])
    data = torch.cat([jacobians.part(name, g) for name, g in gradient.items()])
    flat = data + prior.to(weights) * weights
    return 0.5 * float(flat @ gaussian.product(flat.unsqueeze(0))[0])
