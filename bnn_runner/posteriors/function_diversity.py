"""Function diversity: how much the draws of a posterior differ as functions. Without any it is a point estimate."""

from __future__ import annotations

import torch
from torch import Tensor

from bnn_runner.base import Likelihood
from bnn_runner.models.likelihoods import Gaussian, MeanVariance, Natural
from bnn_runner.tasks import Split

POINTS = 64
"""Points at which functions are compared."""
LEAST_DIVERSITY = 0.01
"""Diversity below which draws count as one function: in units of the noise sd, or of probability."""


def probe_points(test: Split, dtype: torch.dtype) -> Tensor:
    """Inputs of up to 64 evenly spaced test points, without targets, at which functions are compared."""
    places = torch.linspace(0, len(test) - 1, min(POINTS, len(test))).round().long()
    x, _ = test.gather(places)
    return x.to(dtype) if x.is_floating_point() else x


def function_diversity(outputs: Tensor, likelihood: Likelihood) -> float:
    """Mean over points of the standard deviation over draws, of outputs [S, B, K]; 0 for one draw.

    It is taken of class probabilities, or of the mean of y in units of the noise's root mean square over draws and
    points.
    """
    if len(outputs) < 2:
        return 0.0
    outputs = outputs.double()
    if not isinstance(likelihood, (Gaussian, MeanVariance, Natural)):
        return float(outputs.softmax(-1).std(0).mean())
    mean, variance = likelihood.mean_variance(outputs)
    noise = variance.double().expand(mean.shape).mean((0, 1)).sqrt()
    return float((mean / noise).std(0).mean())


def diversity_notes(diversity: float, likelihood: Likelihood, source: str, advice: str) -> list[str]:
    """A note on a posterior whose draws hardly differ; empty where they do.

    Args:
        diversity: of `function_diversity`.
        likelihood: that of the draws.
        source: where the draws come from, as a subject in the plural or singular: "the chains have".
        advice: what to do.
    """
    if diversity >= LEAST_DIVERSITY:
        return []
    regression = isinstance(likelihood, (Gaussian, MeanVariance, Natural))
    unit = "noise standard deviations" if regression else "in probability"
    return [
        f"{source} hardly any function diversity: draws differ by {diversity:.2g} {unit} on average, so this is nearly "
        f"a point estimate. {advice}"
    ]
