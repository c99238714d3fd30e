"""From values at points to scores: means with their standard errors, and scores that do not exist."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from bnn_runner.scoring import Evaluation, Score

NAN = float("nan")


def mean_and_error(values: Tensor) -> tuple[float, float]:
    """Mean of `values` [n] and its standard error, sd / sqrt(n) (NaN for fewer than two)."""
    values = values.double()
    error = float(values.std()) / math.sqrt(len(values)) if len(values) > 1 else NAN
    return float(values.mean()), error


def mean_score(metric: str, values: Tensor, evaluation: Evaluation, **fields: Any) -> Score:
    """The mean over points of `values` [n]; values that are not finite stay visible and are counted in the note."""
    value, error = mean_and_error(values)
    bad = int((~torch.isfinite(values)).sum())
    if bad:
        note = f"{bad} of {len(values)} values are not finite"
        fields["note"] = f"{fields['note']}; {note}" if fields.get("note") else note
    return Score(metric, value, error, len(values), draws=draws_used(evaluation), points=values, **fields)


def not_available(metric: str, reason: str, **fields: Any) -> Score:
    """A score that does not exist, with the reason."""
    return Score(metric, NAN, status="n/a", note=reason, **fields)


def draws_used(evaluation: Evaluation) -> int | None:
    """The number of draws that the scores are computed from; None for a closed form."""
    return len(evaluation.log_weights) if evaluation.has_joint else None
