"""Selecting single weights for a posterior (Daxberger et al. 2021, Bayesian deep learning via subnetwork inference).

They are those of largest marginal variance under a diagonal Laplace, or random ones.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from bnn_runner.base import Network
from bnn_runner.errors import RunFailed, did_you_mean
from bnn_runner.rng import generator

Select = Literal["largest_variance", "random"]


@dataclass(frozen=True)
class Chosen:
    """The selected weights.

    Attributes:
        places: of the weights in each flattened tensor that has some.
        candidates: number of weights that they were selected from.
        never_reached: candidates without influence on the outputs at training points, which are never selected.
    """

    places: Mapping[str, Tensor]
    candidates: int
    never_reached: int = 0

    @property
    def size(self) -> int:
        return sum(len(index) for index in self.places.values())


def candidate_names(network: Network, modules: Sequence[str]) -> tuple[str, ...]:
    """Tensors of the named modules (or tensors) and of their submodules; all tensors where none is named.

    Raises:
        RunFailed: the network does not have a name.
    """
    if not modules:
        return tuple(network.parameters)
    inside = {m: [n for n in network.parameters if n == m or n.startswith(f"{m}.")] for m in modules}
    unknown = [m for m, found in inside.items() if not found]
    if unknown:
        known = dict.fromkeys(n.rpartition(".")[0] or n for n in network.parameters)
        near = did_you_mean(unknown[0], list(known))
        raise RunFailed(
            f"method.modules must name modules with trainable weights; unknown: {', '.join(unknown)}.{near} "
            f"The network has: {', '.join(known)}."
        )
    found = {n for names in inside.values() for n in names}
    return tuple(n for n in network.parameters if n in found)


def count(size: int | float | None, candidates: int) -> int:
    """The number of weights to select: `size` itself, a share of the candidates (below 1), or all (None)."""
    if size is None:
        return candidates
    return min(candidates, size if isinstance(size, int) else max(1, round(size * candidates)))


def choose(
    network: Network,
    names: Sequence[str],
    size: int | float | None,
    select: Select,
    diagonal: Mapping[str, Tensor] | None,
    seed: int,
) -> Chosen:
    """The weights of the basis.

    The marginal variance of weight j is 1/(H_jj + λ_j) with λ of the training prior. A weight with
    H_jj = 0 (behind a dead pixel or unit) has the largest of all but no influence on any training output, so such
    weights are left out, and counted.

    Args:
        network: with the training prior.
        names: tensors of the candidates.
        size: as in `count`.
        select: largest_variance or random.
        diagonal: H_jj of each tensor, [P_t], for largest_variance.
        seed: for random.

    Raises:
        RunFailed: no candidate has an influence on the outputs.
    """
    sizes = [network.parameters[n].numel() for n in names]
    total = sum(sizes)
    wanted, never = count(size, total), 0
    if wanted == total:
        order = torch.arange(total)
    elif select == "random":
        order = torch.randperm(total, generator=generator(seed, "subnetwork"))
    else:
        assert diagonal is not None
        curvature = torch.cat([diagonal[n].cpu() for n in names])
        precision = torch.cat([torch.full_like(diagonal[n].cpu(), network.prior_precision[n]) for n in names])
        reached = curvature > 0
        never = total - int(reached.sum())
        order = torch.argsort(torch.where(reached, curvature + precision, torch.inf), stable=True)
        wanted = min(wanted, total - never)
    if not wanted:
        raise RunFailed(
            "The posterior requires at least one weight with influence on an output at a training point; none of the "
            "candidates has any. Use another method.modules, or train the network."
        )
    mask = torch.zeros(total, dtype=torch.bool)
    mask[order[:wanted]] = True
    device = network.parameters[names[0]].device
    parts = zip(names, mask.split(sizes), strict=True)
    return Chosen({n: part.nonzero()[:, 0].to(device) for n, part in parts if bool(part.any())}, total, never)
