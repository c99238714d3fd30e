"""What all metrics share: weighted mixtures over draws, and means over points with their errors."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from bnn_runner.scoring import Evaluation, Score, SplitEvaluation

NAN = float("nan")


def log_weights(evaluation: Evaluation, num_draws: int | None = None) -> Tensor:
    """Normalised log-weights [S] (of the first `num_draws` draws): their exponentials sum to one."""
    return torch.log_softmax(evaluation.log_weights[:num_draws].double(), 0)


def log_mixture(loglik: Tensor, log_weight: Tensor) -> Tensor:
    """Weighted log-mean-exp, log sum_s w_s exp(loglik[s, ...]): [S, ...] and normalised log w [S] -> [...], nats."""
    shape = (len(log_weight),) + (1,) * (loglik.dim() - 1)
    return torch.logsumexp(loglik + log_weight.to(loglik.dtype).reshape(shape), dim=0).double()


def mixture_mean(values: Tensor, log_weight: Tensor) -> Tensor:
    """sum_s w_s values[s, ...]: [S or 1, ...] -> [...]; a first axis of 1 holds for every draw."""
    if len(values) == 1:
        return values[0].double()
    return torch.tensordot(log_weight.exp(), values.double(), dims=1)


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
    return Score(metric, value, error, len(values), draws=draws_used(evaluation), **fields)


def not_available(metric: str, reason: str, **fields: Any) -> Score:
    """A score that does not exist, with the reason."""
    return Score(metric, NAN, status="n/a", note=reason, **fields)


def draws_used(evaluation: Evaluation) -> int | None:
    """How many draws the scores stand on; none for a closed form."""
    return len(evaluation.log_weights) if evaluation.has_joint else None


def unavailable_partners(evaluation: Evaluation) -> dict[str, str]:
    """Out-of-distribution sets that could not be had, by split name, and why (from the evaluation's notes)."""
    from bnn_runner.evaluation.evaluate import UNAVAILABLE

    found = {}
    for note in evaluation.notes:
        if note.startswith(UNAVAILABLE):
            name, _, reason = note.removeprefix(UNAVAILABLE).partition(": ")
            found[name] = reason
    return found


def total_entropy(split: SplitEvaluation) -> Tensor:
    """Entropy [N] of the predictive class probabilities, nats; 0 log 0 = 0."""
    assert split.mean_probs is not None
    probs = split.mean_probs.double()
    return -torch.xlogy(probs, probs).sum(-1)


def variance_parts(split: SplitEvaluation, log_weight: Tensor) -> tuple[Tensor, Tensor]:
    """Aleatoric and epistemic variance of y, each [N, K], original units squared.

    Draws: sum_s w_s v_s, and the weighted variance over draws of the means. A closed form says
    `epistemic` itself and the rest is aleatoric.
    """
    assert split.means is not None and split.variances is not None
    num_points = split.means.shape[1]
    if split.epistemic is not None:
        epistemic = split.epistemic.double()
        return (split.variances[0].double() - epistemic).expand_as(epistemic), epistemic
    centre = mixture_mean(split.means, log_weight)
    epistemic = mixture_mean((split.means.double() - centre).square(), log_weight)
    aleatoric = mixture_mean(split.variances, log_weight)
    return aleatoric.expand(num_points, centre.shape[-1]), epistemic
