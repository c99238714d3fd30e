"""Why scores are not finite, from the evaluation they were made of, and what to do about it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from bnn_runner.scoring import Evaluation, Score, SplitEvaluation

STEEP = 1e-3
"""Noise, in standard deviations of the targets, below which (or above 1 over which) it is named as the cause."""


def with_causes(scores: Sequence[Score], evaluation: Evaluation) -> list[Score]:
    """The scores; the notes of those that are not finite say what in the evaluation makes them so, and what to do."""
    causes: dict[str, str] = {}
    explained = []
    for score in scores:
        if score.status == "not finite":
            cause = causes.setdefault(score.split, _cause(evaluation, score.split))
            score = replace(score, note=f"{score.note}; {cause}")
        explained.append(score)
    return explained


def _cause(evaluation: Evaluation, name: str) -> str:
    weights = evaluation.log_weights
    if bool(weights.isnan().any()) or not bool(torch.isfinite(weights.logsumexp(0))):
        return "the weights of the draws are not finite, so no mean over draws exists: fit the posterior again"
    split = evaluation.splits.get(name, evaluation.splits.get("test"))
    assert split is not None
    outputs = split.means if split.means is not None else split.mean_probs
    if outputs is not None and (bad := _not_finite(outputs)):
        return (
            f"predictions are not finite at {bad} of {outputs.shape[-2]} points: training or the posterior diverged, "
            "or its draws are too wide. Lower schedule.lr, or raise the prior precision (hyper, prior.precision)"
        )
    if (noise := _noise(split)) is not None and not STEEP <= noise <= 1 / STEEP:
        return (
            f"the noise is {noise:.2g} of the targets' standard deviation, so that log-likelihoods overflow or "
            "covariances are singular to rounding: set likelihood.sigma nearer to it, or likelihood.noise=learned"
        )
    if split.loglik is not None and (bad := _not_finite(split.loglik.unsqueeze(-1))):
        return (
            f"log-likelihoods are not finite at {bad} of {split.loglik.shape[-1]} points: a draw gives a target no "
            "probability that a float64 can hold. Use more draws (eval.num_draws), or a wider noise or posterior"
        )
    return (
        "a sum over its points overflowed, or there are too few points for it: raise likelihood.sigma or the number of "
        "test points"
    )


def _not_finite(values: Tensor) -> int:
    """At how many points [..., N, K] some value is not finite."""
    bad = ~torch.isfinite(values)
    return int(bad.any(-1).reshape(-1, values.shape[-2]).any(0).sum())


def _noise(split: SplitEvaluation) -> float | None:
    """The noise farthest from the targets' standard deviation, as a multiple of it; None where it is unknown."""
    if split.variances is None or split.targets is None:
        return None
    noise = split.variances if split.epistemic is None else split.variances - split.epistemic
    scale = split.targets.double().std(0).clamp_min(1e-300) if len(split.targets) > 1 else torch.ones(1)
    ratio = noise.clamp_min(0).sqrt() / scale
    smallest, largest = float(ratio.min()), float(ratio.max())
    return smallest if smallest < STEEP else largest
