"""The distances of scripts/gap_distances.py on cases with known answers."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from tests.scripts.loading import script


def test_distances_of_gaussians_are_their_closed_forms() -> None:
    """Planted bugs: an integral without the grid's width; weights ignored; the density's 1/σ left out; ½ of TV."""
    gap = script("gap_distances")

    def mixture(weights: list[float], means: list[list[float]], sds: Tensor) -> object:
        return gap.Mixture(torch.tensor(weights).double(), torch.tensor(means).double(), sds.double())

    one = mixture([1.0], [[0.0, 3.0]], torch.tensor([[2.0]]))
    shifted = mixture([1.0], [[1.0, 3.0]], torch.tensor([[2.0]]))
    wasserstein, variation = gap.distances(one, shifted)
    normal = torch.distributions.Normal(0.0, 1.0)
    assert wasserstein.tolist() == pytest.approx([1.0, 0.0], abs=1e-3)
    assert variation.tolist() == pytest.approx([2 * float(normal.cdf(torch.tensor(0.25))) - 1, 0.0], abs=1e-3)
    # Of equal means W1 is the difference of the standard deviations times E|z|.
    wide = mixture([0.5, 0.5], [[0.0, 3.0], [0.0, 3.0]], torch.tensor([[5.0], [5.0]]))
    wasserstein, _ = gap.distances(one, wide)
    assert wasserstein.tolist() == pytest.approx([3 * math.sqrt(2 / math.pi)] * 2, rel=1e-3)
    # Weights count: a quarter of the mass moves by 4.
    uneven = mixture([0.75, 0.25], [[0.0, 3.0], [4.0, 7.0]], torch.tensor([[2.0]]))
    wasserstein, _ = gap.distances(uneven, one)
    assert wasserstein.tolist() == pytest.approx([1.0, 1.0], rel=1e-3)
    mean, sd = uneven.moments()
    assert mean.tolist() == [1.0, 4.0] and sd.tolist() == pytest.approx([math.sqrt(4 + 3)] * 2)
