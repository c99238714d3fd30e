"""Moments and quantile transforms of the predictive mixture, against numbers worked out by hand."""

from __future__ import annotations

import math

import pytest
import torch

from bnn_runner.evaluation.predictive import mixture_mean, pit, variance_parts
from bnn_runner.scoring import SplitEvaluation


def test_the_variance_splits_into_noise_and_spread_of_the_means() -> None:
    means = torch.tensor([[[0.0]], [[4.0]]])
    split = SplitEvaluation(torch.arange(1), means=means, variances=torch.tensor([[[1.0]], [[3.0]]]))
    weights = torch.tensor([0.25, 0.75]).double().log()
    aleatoric, epistemic = variance_parts(split, weights)
    assert mixture_mean(split.means, weights).item() == pytest.approx(3.0)
    assert epistemic.item() == pytest.approx(0.25 * 9 + 0.75 * 1)
    assert aleatoric.item() == pytest.approx(0.25 * 1 + 0.75 * 3)
    closed = SplitEvaluation(
        torch.arange(1), means=means[:1], variances=torch.tensor([[[5.0]]]), epistemic=torch.tensor([[2.0]])
    )
    aleatoric, epistemic = variance_parts(closed, torch.zeros(1))
    assert (aleatoric.item(), epistemic.item()) == (3.0, 2.0)


def test_pit_of_calibrated_numbers_is_uniform() -> None:
    """10,000 draws from the mixture itself: mean 1/2 and variance 1/12 within 5 standard errors."""
    generator = torch.Generator().manual_seed(0)
    n, means, sds, weights = 10_000, torch.tensor([-1.0, 2.0]), torch.tensor([0.5, 2.0]), torch.tensor([0.3, 0.7])
    which = torch.multinomial(weights, n, replacement=True, generator=generator)
    y = means[which] + sds[which] * torch.randn(n, generator=generator)
    split = SplitEvaluation(
        torch.arange(n),
        targets=y[:, None],
        means=means[:, None, None].expand(2, n, 1),
        variances=sds.square()[:, None, None],
    )
    transformed = pit(split, weights.double().log())
    assert abs(transformed.mean() - 0.5) < 5 * math.sqrt(1 / 12 / n)
    assert abs(transformed.var() - 1 / 12) < 5 * math.sqrt(1 / 180 / n)
