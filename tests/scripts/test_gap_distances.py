"""The distances of scripts/gap_distances.py on cases with known answers."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from tests.scripts.loading import SCRIPTS, script


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


def test_the_page_sorts_by_the_gap_and_keeps_unmixed_chains_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    """Planted bugs: sorted by another region; one mixed seed is enough; HMC's own error compared as a method."""
    monkeypatch.syspath_prepend(str(SCRIPTS))
    gap = script("gap_methods")

    def found(method: str, values: list[float], rhats: list[float | None]) -> list[object]:
        return [
            gap.Distance(method, seed, v, 9 - v, 0.0, 0.0, 0.0, 1.0, -v, r, 10.0 if r else None, "")
            for seed, (v, r) in enumerate(zip(values, rhats, strict=True))
        ]

    runs = [
        *found("hmc", [0.0, 0.0, 0.0], [1.01, 1.02, 1.0]),
        *found(gap.OWN, [0.1, 0.1, 0.1], [None] * 3),
        *found("map", [3.0, 3.1, 3.2], [None] * 3),
        *found("laplace", [1.0, 1.1, 1.2], [None] * 3),
        *found("sgld", [0.5, 0.5, 0.5], [1.0, 1.0, 1.3]),
    ]
    text = gap.page(runs, "toy")
    methods = [line.split("|")[1].strip() for line in text.splitlines() if line.startswith("|")]
    assert [m for m in methods if m not in ("method", "---")] == [gap.OWN, "laplace", "map", "sgld"]
    assert "Closest in the gap: laplace" in text and "map 2.000 ± 0.000" in text
    assert "R-hat at most 1.02" in text


def test_the_aim_of_online_evidence_is_judged_against_one_reference() -> None:
    """Planted bugs: the default as a second reference; a setting within the aim that keeps too little counts."""
    online = script("benchmark_online")

    def row(setting: str, time: float, share: float, loglik: float = -0.17) -> dict[str, object]:
        numbers = {"time_over_map": time, "share_of_gain": share, "test_loglik": loglik}
        return {"setting": setting, **numbers, **{f"{name}_se": None for name in numbers}}

    rows = [row("map", 1.0, -20.0), row("map, after", 1.0, 0.0), row("dearest", 5.0, 1.0)]
    rows += [row("good", 2.9, 0.97), row("worse score", 1.0, 0.99, -0.3), row(online.DEFAULT, 1.9, 0.9)]
    said = online.verdict(rows)
    assert "The aim is not met" in said and "**good**, at 2.90 times" in said
    assert f"The best setting within the aim, {online.DEFAULT}, has 0.90" in said
    rows[3]["time_over_map"] = 1.5
    assert "The aim is met" in online.verdict(rows)
