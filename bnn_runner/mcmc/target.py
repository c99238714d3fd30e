"""The log posterior of L chains at once, over flat weight vectors [L, P].

log π(w) = Σ_n log p(y_n | f(x_n, w)) − ½ wᵀΛw, with Λ the training prior and the likelihood's noise fixed
at its trained value. Batchnorm statistics are those of the network that the chain starts from, so that the
target is a fixed function of the weights.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor, nn
from torch.func import functional_call, vmap

from bnn_runner.base import Likelihood, Network
from bnn_runner.models.likelihoods import Gaussian
from bnn_runner.training.lanes import Tensors

StackedForward = Callable[[Tensors, Tensors, Tensor], Tensor]
"""(parameters [L, ...], buffers [L, ...], x [L, B, ...]) -> outputs [L, B, K]."""


@dataclass(frozen=True)
class Layout:
    """Where each parameter tensor lies in a flat weight vector [P]."""

    shapes: Mapping[str, tuple[int, ...]]

    @property
    def size(self) -> int:
        return sum(self.sizes)

    @property
    def sizes(self) -> list[int]:
        return [prod(shape) for shape in self.shapes.values()]

    def flatten(self, parameters: Mapping[str, Tensor]) -> Tensor:
        """[P] from one network's parameters."""
        return torch.cat([parameters[name].reshape(-1) for name in self.shapes])

    def unflatten(self, flat: Tensor) -> Tensors:
        """Views [..., *shape] by name from [..., P]."""
        parts = flat.split(self.sizes, dim=-1)
        return {n: p.reshape(*flat.shape[:-1], *s) for (n, s), p in zip(self.shapes.items(), parts, strict=True)}


def stacked_forward(module: nn.Module, num_lanes: int, device: torch.device) -> StackedForward:
    """The forward pass of L networks: stacked where the module supports it, by vmap on a GPU, else one by one.

    That is the rule of `training.lanes` without its timing. Weights are passed in each call, since every step changes
    them.
    """
    if num_lanes > 1 and getattr(module, "stacks_lanes", False):
        return lambda parameters, buffers, x: functional_call(module, {**parameters, **buffers}, (x,))

    def one(parameters: Tensors, buffers: Tensors, x: Tensor) -> Tensor:
        return functional_call(module, {**parameters, **buffers}, (x,))

    if num_lanes > 1 and device.type != "cpu":
        return vmap(one)

    def in_turn(parameters: Tensors, buffers: Tensors, x: Tensor) -> Tensor:
        def lane(tensors: Tensors, i: int) -> Tensors:
            return {name: t[i] for name, t in tensors.items()}

        return torch.stack([one(lane(parameters, i), lane(buffers, i), x[i]) for i in range(len(x))])

    return in_turn


class LogPosterior:
    """Log posterior of L chains of one architecture and its gradient.

    Call it with the module in evaluation mode (entering that mode in each step would cost as much as a small network).

    Args:
        starts: the network that each chain starts from.
        reference: the network whose likelihood and prior are used.
        num_points: N, which scales the mean over a batch to the whole training set.
        dtype: of the computation.
    """

    def __init__(self, starts: Sequence[Network], reference: Network, num_points: int, dtype: torch.dtype) -> None:
        first = reference
        self.module, self.num_points, self.dtype = first.module, num_points, dtype
        self.layout = Layout({name: tuple(p.shape) for name, p in first.parameters.items()})
        self.start = torch.stack([self.layout.flatten(n.parameters) for n in starts]).detach().to(dtype)
        self.buffers = {name: torch.stack([_as(n.buffers[name], dtype) for n in starts]) for name in first.buffers}
        self.likelihood: Likelihood = first.likelihood
        if isinstance(first.likelihood, Gaussian):
            self.likelihood = Gaussian(first.likelihood.log_noise.to(dtype))
        per_tensor = torch.tensor([first.prior_precision[n] for n in self.layout.shapes], dtype=dtype)
        self.precision = per_tensor.repeat_interleave(torch.tensor(self.layout.sizes)).to(self.start.device)
        self._forward = stacked_forward(self.module, len(starts), self.start.device)

    def outputs(self, w: Tensor, x: Tensor) -> Tensor:
        """Network outputs [L, B, K] at weights [L, P] and inputs [L, B, ...], in the module's current mode."""
        return self._forward(self.layout.unflatten(w), self.buffers, x)

    def __call__(self, w: Tensor, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        """Log π [L] (up to the prior's constant) and its gradient [L, P], estimated from a batch.

        x is [L, B, ...], y [L, B, ...]. N times the mean over the batch is unbiased for the sum over the data, and
        exact with all N points.
        """
        w = w.detach().requires_grad_()
        with torch.enable_grad():
            outputs = self.outputs(w, x)
        loglik, slope = _mean_loglik(self.likelihood, outputs.detach(), y)
        (gradient,) = torch.autograd.grad(outputs, w, slope)
        w = w.detach()
        decay = self.precision * w
        value = torch.add(self.num_points * loglik, (decay * w).sum(-1), alpha=-0.5)
        return value, torch.sub(self.num_points * gradient, decay)


def _mean_loglik(likelihood: Likelihood, outputs: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    """Mean over the batch of log p(y | outputs), [L], and its gradient in the outputs, [L, B, K].

    For the usual Gaussian by formula, (y − f)/(B σ²), which saves a third of a small network's step; else by
    autograd.
    """
    if isinstance(likelihood, Gaussian) and likelihood.log_noise.dim() == 1:
        precision = torch.exp(-2 * likelihood.log_noise)
        residual = y - outputs
        slope = residual * (precision / outputs.shape[1])
        constant = (likelihood.log_noise + 0.5 * math.log(2 * math.pi)).sum()
        return (residual * slope).sum((1, 2)).mul_(-0.5).sub_(constant), slope
    outputs = outputs.requires_grad_()
    with torch.enable_grad():
        loglik = likelihood.log_prob(outputs, y).mean(-1)
        (slope,) = torch.autograd.grad(loglik.sum(), outputs)
    return loglik.detach(), slope


def _as(buffer: Tensor, dtype: torch.dtype) -> Tensor:
    return buffer.to(dtype) if buffer.is_floating_point() else buffer
