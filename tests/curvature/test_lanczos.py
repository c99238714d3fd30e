"""The largest eigenvalue from products, compared with a dense decomposition."""

from __future__ import annotations

import math
from itertools import islice

import torch
from torch import Tensor

from bnn_runner.curvature.lanczos import lanczos, largest_eigenvalue


def matrices() -> Tensor:
    """Two symmetric matrices [2, 60, 60]: a decaying spectrum, and one whose largest eigenvalue is negative."""
    random = torch.Generator().manual_seed(0)
    bases = torch.linalg.qr(torch.randn(2, 60, 60, generator=random, dtype=torch.float64)).Q
    falling = 3.0 * 0.8 ** torch.arange(60, dtype=torch.float64)
    values = torch.stack([falling, torch.cat([-5 * torch.ones(1, dtype=torch.float64), falling[1:]])])
    return bases @ torch.diag_embed(values) @ bases.mT


def test_the_largest_eigenvalue_from_below() -> None:
    """Planted bugs: the largest instead of the largest in size; rows mixed up; a start that is not normalised; no end
    before the last step."""
    a, calls = matrices(), 0
    start = 7 * torch.randn(2, 60, generator=torch.Generator().manual_seed(1), dtype=torch.float64)

    def product(v: Tensor) -> Tensor:
        nonlocal calls
        calls += 1
        return torch.einsum("qij,qj->qi", a, v)

    exact = torch.tensor([3.0, 5.0], dtype=torch.float64)
    found = largest_eigenvalue(product, start)
    assert bool((found <= exact + 1e-12).all()) and bool((found > 0.97 * exact).all())
    assert calls < 15, "twenty steps would be taken without an end"
    torch.testing.assert_close(largest_eigenvalue(product, start, steps=60, tolerance=0.0), exact)


def test_a_space_that_is_used_up_ends_the_process() -> None:
    """Planted bug: a division by the rounding that is left."""
    a = torch.diag(torch.tensor([4.0, 2.0, 1.0], dtype=torch.float64))
    start = torch.tensor([[0.6, 0.8, 0.0]], dtype=torch.float64)
    terms = list(islice(lanczos(lambda v: v @ a, start), 5))
    assert len(terms) == 2 and float(terms[-1][1]) == 0
    assert math.isclose(float(largest_eigenvalue(lambda v: v @ a, start)), 4.0)


def test_an_estimate_that_pauses_once_is_not_the_end() -> None:
    """The largest eigenvalue, ten times the others, has a share of 5e-5 in the start: the second product still
    raises the estimate by less than a per cent. Planted bug: an end at the first estimate that stays."""
    values = torch.cat([torch.tensor([10.0]), torch.linspace(0.99, 1.0, 30)]).double()
    start = torch.cat([torch.tensor([5e-5]), torch.ones(30)]).double()
    assert math.isclose(float(largest_eigenvalue(lambda v: v * values, start[None])), 10.0, rel_tol=1e-3)


def test_a_product_that_is_not_finite_is_told() -> None:
    assert bool(torch.isnan(largest_eigenvalue(lambda v: v * math.nan, torch.ones(2, 5))).all())
