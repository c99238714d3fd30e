"""Rows of the table from the log-likelihoods of blocks or points: exact where the predictive is, from draws elsewhere.

Three kinds of posterior. A finite one (MAP, an ensemble) is the mixture of its own members, and the
score is that mixture's. One whose predictive is a known Gaussian has the exact value as its score,
and the one from draws in a companion row, `<metric>_by_draws`. Any other has the estimate from
draws, with the status by the rule of `bnn_runner.metrics.log_mean`.

Companions of an estimate from draws: `<metric>_at_draws` with the first S/4, S/2 and all draws, and
`<metric>_effective_draws`, the harmonic mean over blocks. Where the posterior has a centre, `centre_<metric>`
and `<metric>_minus_centre` are its score and the difference of the two (see `metrics.centre`).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from bnn_runner.evaluation.predictive import log_weights
from bnn_runner.metrics.blocks import Blocks
from bnn_runner.metrics.centre import difference, named
from bnn_runner.metrics.gaussian_blocks import exact_blocks, exact_points
from bnn_runner.metrics.log_mean import MIN_DRAWS, STARVED, LogMean, group_bounds, log_mean
from bnn_runner.metrics.scores import NAN, not_available
from bnn_runner.scoring import Evaluation, Score

BY_DRAWS, AT_DRAWS, EFFECTIVE = "_by_draws", "_at_draws", "_effective_draws"
NO_DRAWS = "a closed-form predictive has no draws, so there is no joint probability of several points"
EXACT = "exact Gaussian"


def block_scores(
    metric: str, evaluation: Evaluation, repeats: Sequence[Blocks], tau: int, tolerance: float, note: str, **fields: Any
) -> list[Score]:
    """The score of R permutations of M blocks of the test set, first, and its companions.

    Args:
        metric: name of the first row.
        evaluation: whose test split has log-likelihoods.
        repeats: the R permutations.
        tau: labels in a block.
        tolerance: bias that is allowed however small the standard error is, nats per label.
        note: how the blocks were made.
        fields: further fields of every row (`kappa`).
    """
    fields = {"better": "higher", "unit": "nats per block", "tau": tau, **fields}
    values, reason = exact_blocks(evaluation, repeats)
    if values is None and not evaluation.has_joint:
        return [not_available(metric, reason or NO_DRAWS, **fields)]
    loglik = evaluation.test.loglik
    assert loglik is not None
    own = _scores(metric, evaluation, loglik, repeats, values, tolerance * tau, reason, fields | {"note": note})
    return [*own.scores, *_against_centre(own, evaluation, "test", repeats, fields)]


def point_scores(metric: str, evaluation: Evaluation, name: str, **fields: Any) -> list[Score]:
    """The score of single points of a split, as `block_scores`; no bias beyond the standard error is allowed."""
    loglik = evaluation.splits[name].loglik
    assert loglik is not None
    fields = {"better": "higher", "split": name, **fields}
    points = [Blocks(torch.arange(loglik.shape[1]).unsqueeze(1))]
    # Without draws there is one line of log-likelihoods, those of the closed form itself.
    values = exact_points(evaluation, name) if evaluation.has_joint else loglik.double()
    own = _scores(metric, evaluation, loglik, points, values, 0.0, "", fields)
    return [*own.scores, *_against_centre(own, evaluation, name, points, fields)]


def mean_over_blocks(values: Tensor) -> tuple[float, float]:
    """Mean of [R, M] and its standard error: sd over the M blocks of one permutation / sqrt(M).

    Permutations share their points, so R of them do not make the error sqrt(R) smaller.
    """
    mean = float(values.mean())
    if values.shape[1] < 2:
        return mean, NAN
    return mean, math.sqrt(float(values.var(dim=1).mean()) / values.shape[1])


@dataclass(frozen=True)
class _Scored:
    """Rows, the first of which is the score; its values [R, M], and the draws' own error of their mean."""

    scores: list[Score]
    values: Tensor
    by_draws: float = 0.0


def _against_centre(
    own: _Scored, evaluation: Evaluation, name: str, repeats: Sequence[Blocks], fields: dict[str, Any]
) -> list[Score]:
    """The centre's score, and the posterior's minus it, over the same blocks; none where there is no centre."""
    split = None if evaluation.centre is None else evaluation.centre.splits.get(name)
    if split is None or split.loglik is None:
        return []
    single = torch.zeros(1, dtype=torch.float64)
    alone = log_mean(split.loglik, single, repeats, [0, 1]).parts()[0]
    score = own.scores[0]
    mean, over_blocks = mean_over_blocks(own.values - alone)
    centre = _row(score.metric, alone, {**fields, "note": score.note if score.status == "ok" else ""})
    return [named(centre), difference(score, mean, math.hypot(over_blocks, own.by_draws))]


def _scores(
    metric: str,
    evaluation: Evaluation,
    loglik: Tensor,
    repeats: Sequence[Blocks],
    exact: Tensor | None,
    tolerance: float,
    reason: str,
    fields: dict[str, Any],
) -> _Scored:
    """Rows of exact values [R, M], if there are any, and of those from draws."""
    scores: list[Score] = []
    if exact is not None:
        closed = EXACT if evaluation.kind == "regression" else ""
        scores.append(_row(metric, exact, fields, closed))
        if not evaluation.has_joint:
            return _Scored(scores, exact)
        metric = f"{metric}{BY_DRAWS}"
    weights = log_weights(evaluation)
    num_draws = len(weights)
    bounds = [0, num_draws] if evaluation.finite else group_bounds(num_draws)
    found = log_mean(loglik, weights, repeats, bounds)
    if evaluation.finite:
        values, by_draws = found.parts()[0], 0.0
        scores.append(_row(metric, values, fields, reason, draws=num_draws))
    else:
        values, by_draws = found.values(), found.draws_error()
        scores += _from_draws(metric, found, num_draws, tolerance, reason, fields)
    if exact is not None:
        return _Scored(scores, exact)
    return _Scored(scores, values, 0.0 if math.isnan(by_draws) else by_draws)


def _from_draws(
    metric: str, found: LogMean, num_draws: int, tolerance: float, reason: str, fields: dict[str, Any]
) -> list[Score]:
    """The estimate with its status, and its companions."""
    values = found.values()
    _, over_blocks = mean_over_blocks(values)
    by_draws = found.draws_error()
    # Of one block nothing is known over blocks, and the draws' own error judges the bias; below MIN_DRAWS nothing does.
    error = over_blocks if math.isnan(by_draws) else math.hypot(over_blocks, by_draws)
    scale = next((e for e in (error, by_draws) if not math.isnan(e)), 0.0)
    share, share_error = mean_over_blocks(1 / found.effective)
    effective = 1 / share
    allowed = max(scale, tolerance)
    why = _why_not(found, num_draws, effective, allowed)
    status = "not converged" if why else "ok"
    score = _row(metric, values, fields, *filter(None, (reason, why)), draws=num_draws, status=status, error=error)
    scores = [score]
    for groups in (found.num_groups // 4, found.num_groups // 2, found.num_groups) if num_draws >= MIN_DRAWS else ():
        first = group_bounds(num_draws)[groups]
        row = _row("", found.values(slice(0, groups)), fields | {"note": ""}, draws=first)
        row = row if groups < found.num_groups else replace(score, status="ok", note="")
        scores.append(replace(row, metric=f"{metric}{AT_DRAWS}"))
    counted = fields | {"unit": "draws", "note": "harmonic mean over blocks", "n": values.shape[1]}
    return [*scores, Score(f"{metric}{EFFECTIVE}", effective, share_error / share**2, draws=num_draws, **counted)]


def _why_not(found: LogMean, num_draws: int, effective: float, allowed: float) -> str:
    """Why the score has not converged; empty where it has."""
    if num_draws < MIN_DRAWS:
        return f"{num_draws} draws are too few to judge (at least {MIN_DRAWS}); increase eval.num_draws"
    if not effective >= STARVED:
        return f"{effective:.2g} effective draws per block (at least {STARVED:g}); increase eval.num_draws"
    bias = found.remaining_bias()
    if not bias <= allowed:
        return f"the bias may be {bias:.2g} nats, which is more than {allowed:.2g}; increase eval.num_draws"
    return ""


def _row(
    metric: str,
    values: Tensor,
    fields: dict[str, Any],
    *remarks: str,
    draws: int | None = None,
    status: str = "ok",
    error: float | None = None,
) -> Score:
    """The mean over blocks of `values` [R, M]; values that are not finite stay visible and are counted in the note.

    The score keeps the values of the first permutation, whose blocks are the same for every method.
    """
    mean, over_blocks = mean_over_blocks(values)
    bad = int((~torch.isfinite(values)).sum())
    counted = f"{bad} of {values.numel()} values are not finite" if bad else ""
    note = "; ".join(part for part in (fields.get("note", ""), *remarks, counted) if part)
    error = over_blocks if error is None else error
    counted_fields = {"n": values.shape[1], "note": note, "draws": draws, "status": status, "points": values[0]}
    return Score(metric, mean, error, **(fields | counted_fields))
