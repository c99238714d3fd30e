"""What the row says of chains: mixing in function space, spread, and notes where either is missing."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from bnn_runner.likelihoods import Gaussian
from bnn_runner.mcmc.diagnostics import FEWEST, effective_draws, rhat
from bnn_runner.mcmc.target import LogPosterior
from bnn_runner.tasks import Split

POINTS = 64
"""Points at which functions are compared."""
RHAT_LIMIT = 1.1
MOST_RHAT = 1000.0
"""Told for chains that do not move at all, whose R-hat is infinite."""
LEAST_SPREAD = 0.01
"""Spread below which draws count as one function: in units of the noise sd, or of probability."""


def probe_points(test: Split, dtype: torch.dtype) -> Tensor:
    """Inputs of up to 64 test points, evenly taken, without their targets: where mixing is looked at."""
    places = torch.linspace(0, len(test) - 1, min(POINTS, len(test))).round().long()
    x, _ = test.gather(places)
    return x.to(dtype) if x.is_floating_point() else x


@torch.no_grad()
def functions(target: LogPosterior, weights: Tensor, x: Tensor, classes: bool) -> Tensor:
    """What draws [L, M, P] say at points [B, ...]: outputs, or log-probabilities of classes, as [L, M, B·K]."""
    lanes, count, _ = weights.shape
    inputs = x.expand(lanes, *x.shape)
    outputs = torch.stack([target.outputs(weights[:, m].to(target.dtype), inputs) for m in range(count)], 1)
    if classes:
        outputs = outputs.log_softmax(-1)
    return outputs.reshape(lanes, count, -1).double()


def summarise(target: LogPosterior, weights: Tensor, x: Tensor, classes: bool, remedy: str) -> dict[str, Any]:
    """R-hat and effective draws of the functions at points x, their spread, and notes; for the report.

    rhat is the largest over points and outputs, ess the smallest, beside their medians. spread is the mean over
    points of the standard deviation over all draws, of class probabilities, or of outputs in units of the noise.
    `remedy` ends the note on chains that have not mixed.
    """
    values = functions(target, weights, x, classes)
    seen = values.exp() if classes else values
    if isinstance(target.likelihood, Gaussian):
        noise = target.likelihood.log_noise.double().exp()
        seen = seen / noise.repeat(values.shape[-1] // len(noise))
    spread = float(seen.flatten(0, 1).std(0).mean()) if seen.shape[0] * seen.shape[1] > 1 else 0.0
    mixing, effective = rhat(values).clamp_max(MOST_RHAT), effective_draws(values)
    found: dict[str, Any] = {
        "chains": weights.shape[0],
        "draws_kept": weights.shape[0] * weights.shape[1],
        "rhat": _or_none(mixing.nan_to_num(-1).max()),
        "rhat_median": _or_none(mixing.nanmedian()),
        "ess": _or_none(effective.nan_to_num(float("inf")).min()),
        "ess_median": _or_none(effective.nanmedian()),
        "function_spread": spread,
        "notes": [],
    }
    unit = "in probability" if classes else "noise standard deviations"
    if spread < LEAST_SPREAD:
        found["notes"].append(
            f"the chains have hardly any spread: draws differ by {spread:.2g} {unit} on average, so this is nearly a "
            "point estimate. Raise method.step, or the length of the chains."
        )
    if weights.shape[1] < FEWEST:
        found["notes"].append(f"R-hat and effective draws need {FEWEST} draws a chain; there are {weights.shape[1]}")
    elif found["rhat"] is not None and found["rhat"] > RHAT_LIMIT:
        found["notes"].append(
            f"the chains have not mixed: R-hat in function space is {found['rhat']:.2f} at its worst point (median "
            f"{found['rhat_median']:.2f}; below {RHAT_LIMIT:g} is well), {found['ess']:.0f} effective draws there. "
            + remedy
        )
    return found


def _or_none(value: Tensor) -> float | None:
    number = float(value)
    return number if number == number and 0 <= number < float("inf") else None
