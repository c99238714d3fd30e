"""Where chains start, and step sizes from the curvature there."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Literal

import torch
from torch import Tensor

from bnn_runner.base import Network, TrainingSpec
from bnn_runner.curvature.lanczos import largest_eigenvalue
from bnn_runner.errors import UserError
from bnn_runner.mcmc.target import LogPosterior
from bnn_runner.rng import generator
from bnn_runner.tasks import Split

Start = Literal["members", "map", "initial"]
"""members: chain i at the trained ensemble member i; map: all at the MAP network; initial: at initial weights."""

GIGABYTE = 2**30


def refusals(method: object, rules: Mapping[str, tuple[bool, str]]) -> list[str]:
    """A problem for every field whose rule is broken; a rule is (whether it is met, what it requires)."""
    return [
        f"method.{name} must be {rule}; got {getattr(method, name)}." for name, (met, rule) in rules.items() if not met
    ]


def starting_specs(start: Start, chains: int) -> list[TrainingSpec]:
    """The networks that chains need. The first is always the MAP network, whose noise is used."""
    if start == "map":
        return [TrainingSpec(0)]
    if start == "members":
        return [TrainingSpec(member) for member in range(chains)]
    return [TrainingSpec(0), *(TrainingSpec(member, trained=False) for member in range(chains))]


def starting_networks(start: Start, chains: int, networks: Sequence[Network]) -> list[Network]:
    """One network per chain, from those of `starting_specs`."""
    if start == "map":
        return [networks[0]] * chains
    if start == "members":
        return list(networks)
    # The noise of untrained networks is meaningless; the first network's is used.
    return list(networks[1:])


def check_memory(draws: int, size: int, most_gigabytes: float) -> float:
    """Memory of the draws in float32, GiB.

    Raises:
        UserError: it is above `most_gigabytes`.
    """
    cost = draws * size * 4 / GIGABYTE
    if cost > most_gigabytes:
        raise UserError(
            f"{draws} draws of {size:,} weights must fit into method.max_gigabytes={most_gigabytes:g}; they take "
            f"{cost:.1f} GiB of memory. Keep {int(most_gigabytes * GIGABYTE / 4 / size)} draws or fewer "
            "(method.keep, or method.chains and method.draws of HMC), or raise method.max_gigabytes."
        )
    return cost


def largest_curvature(gradient: Callable[[Tensor], Tensor], position: Tensor, seed: int) -> float:
    """Largest |eigenvalue| of ∇² log π at positions [L, P], over all chains, by Lanczos steps on gradient differences.

    At most twenty central differences, mostly six to ten; the estimate is low by about one per cent.
    """
    direction = torch.randn(position.shape[-1], generator=generator(seed, "power"), dtype=position.dtype)
    reach = 1e-3 * position.norm(dim=-1, keepdim=True).clamp_min(1e-3)

    def product(v: Tensor) -> Tensor:
        ahead, behind = gradient(position + reach * v), gradient(position - reach * v)
        return (behind - ahead) / (2 * reach)

    return float(largest_eigenvalue(product, direction.to(position.device).expand_as(position)).max())


def mean_square_gradient(target: LogPosterior, train: Split, seed: int, batches: int = 8, batch: int = 16) -> Tensor:
    """The first mean squared gradient of `preconditioned`, [L, P]: Σ_n g_n² / N² over points.

    That is the variance of ∇ log π / N under the posterior, by the Fisher identity; at a trained network the
    gradient itself would be almost zero, and the first steps enormous. It is estimated from small batches, whose
    squared mean is Σ g_n² / (N · batch) on average.
    """
    lanes, size = len(target.start), min(batch, len(train))
    total = torch.zeros_like(target.start)
    for i in range(batches):
        chosen = torch.randperm(len(train), generator=generator(seed, "square", i))[:size]
        x, y = train.gather(chosen.expand(lanes, size))
        assert y is not None
        _, gradient = target(target.start, x, y)
        total += (gradient / len(train)).square()
    return total / batches * size / len(train)
