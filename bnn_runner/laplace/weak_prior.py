"""Precisions so small that the posterior is made of rounding are refused."""

from __future__ import annotations

import torch
from torch import Tensor

from bnn_runner.base import HyperRule
from bnn_runner.curvature.base import WeightGaussian
from bnn_runner.errors import RunFailed
from bnn_runner.hyper.fixed import Fixed

MOST_INFORMATION = 1e12
"""Largest eigenvalue of Λ^{-½}HΛ^{-½}. Rounding (1e-16 in float64; in float32 1e-7 of a derivative, squared) leaves
eigenvalues of some 1e-15 of it where H has none: a thousandth of the prior's precision, and some 1e-3 nats each."""


def too_weak(gaussian: WeightGaussian) -> bool:
    """Whether the prior is so weak that the rounding of the curvature counts as information."""
    return float(getattr(gaussian, "rounded_information", 0.0)) > MOST_INFORMATION


def refuse_too_weak(gaussian: WeightGaussian, precisions: Tensor, rule: HyperRule) -> None:
    """Raises `RunFailed` with the smallest precision that is right, where these are below it."""
    if not too_weak(gaussian):
        return
    information = float(getattr(gaussian, "rounded_information", 0.0))
    found = float(torch.as_tensor(precisions).min())
    least = 1.01 * found * information / MOST_INFORMATION
    key = "hyper.precision" if isinstance(rule, Fixed) else "the selected prior precision"
    remedy = "Raise it" if isinstance(rule, Fixed) else "Use hyper=fixed with a larger precision"
    raise RunFailed(
        f"{key} must be at least {least:.3g}; got {found:.3g}. Under a weaker prior the rounding of "
        f"the curvature, whose largest eigenvalue is {found * information:.2g}, counts as information. {remedy}, or "
        "use method.structure=diag."
    )
