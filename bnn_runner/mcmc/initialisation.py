"""Where chains begin, and step sizes from the curvature found there."""

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
    """A problem for every field whose rule (is it met?, what it asks) is broken."""
    return [
        f"method.{name}={getattr(method, name)} cannot be. It must be {rule}."
        for name, (met, rule) in rules.items()
        if not met
    ]


def starting_specs(start: Start, chains: int) -> list[TrainingSpec]:
    """The networks that chains need. The first is always the MAP network, which gives the noise."""
    if start == "map":
        return [TrainingSpec(0)]
    if start == "members":
        return [TrainingSpec(member) for member in range(chains)]
    return [TrainingSpec(0), *(TrainingSpec(member, trained=False) for member in range(chains))]


def starting_networks(start: Start, chains: int, networks: Sequence[Network]) -> list[Network]:
    """One network a chain, out of those of `starting_specs`; noise and prior are the MAP network's."""
    if start == "map":
        return [networks[0]] * chains
    if start == "members":
        return list(networks)
    # Untrained networks carry the noise of an untrained fit, which is of no use: the first network's counts.
    return list(networks[1:])


def check_memory(draws: int, size: int, most_gigabytes: float) -> float:
    """Gigabytes (2³⁰ bytes) that the draws will take in float32. Raises `UserError` above the limit."""
    cost = draws * size * 4 / GIGABYTE
    if cost > most_gigabytes:
        raise UserError(
            f"method.keep={draws} draws of {size:,} weights would take {cost:.1f} GiB, more than "
            f"method.max_gigabytes={most_gigabytes:g}. All of them are held in memory. Lower method.keep to "
            f"{int(most_gigabytes * GIGABYTE / 4 / size)} or less, or raise method.max_gigabytes."
        )
    return cost


def largest_curvature(gradient: Callable[[Tensor], Tensor], position: Tensor, seed: int) -> float:
    """Largest |eigenvalue| of ∇² log π at positions [L, P], over all chains, by Lanczos steps on gradient differences.

    At most twenty central differences, six to ten mostly; an estimate from below, by a per cent or so.
    """
    direction = torch.randn(position.shape[-1], generator=generator(seed, "power"), dtype=position.dtype)
    reach = 1e-3 * position.norm(dim=-1, keepdim=True).clamp_min(1e-3)

    def product(v: Tensor) -> Tensor:
        ahead, behind = gradient(position + reach * v), gradient(position - reach * v)
        return (behind - ahead) / (2 * reach)

    return float(largest_eigenvalue(product, direction.to(position.device).expand_as(position)).max())


def mean_square_gradient(target: LogPosterior, train: Split, seed: int, batches: int = 8, batch: int = 16) -> Tensor:
    """Where the mean squared gradient of `preconditioned` starts, [L, P]: Σ_n g_n² / N² over points.

    That is the variance of ∇ log π / N that the posterior itself gives by the Fisher identity; at a
    trained network the gradient alone would be nearly nothing, and the first steps enormous. It is
    estimated from small batches, whose squared mean is Σ g_n² / (N · batch) on average.
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
