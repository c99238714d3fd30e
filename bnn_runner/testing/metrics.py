"""The contract of a metric: a pure function of an evaluation and a seed."""

from __future__ import annotations

import dataclasses
import math
from typing import get_args

import torch

from bnn_runner.rng import generator
from bnn_runner.scoring import Evaluation, Metric, Score, ScoreStatus, SplitEvaluation
from bnn_runner.tasks import Kind
from bnn_runner.testing.expect import require

POINTS, DRAWS = 60, 8


def make_evaluation(kind: Kind, predictive: str = "draws", seed: int = 0) -> Evaluation:
    """An evaluation as a posterior of 8 draws leaves it: test, val and one out-of-distribution set of 60 points.

    Args:
        kind: regression (one output) or classification (three classes).
        predictive: draws, or closed_form, which has a single line of log-likelihoods and no joint score.
        seed: of its numbers.
    """
    random = generator(seed, "test evaluation")
    draws = DRAWS if predictive == "draws" else 1

    def split(first_id: int) -> SplitEvaluation:
        ids = torch.arange(first_id, first_id + POINTS)
        if kind == "classification":
            logits = torch.randn(draws, POINTS, 3, generator=random, dtype=torch.float64)
            probs = logits.softmax(-1)
            y = torch.arange(POINTS) % 3
            loglik = probs[:, torch.arange(POINTS), y].log()
            entropy = -(probs * probs.log()).sum(-1).mean(0)
            return SplitEvaluation(ids, loglik, y, probs.mean(0), entropy)
        means = torch.randn(draws, POINTS, 1, generator=random, dtype=torch.float64)
        variances = torch.full((draws, 1, 1), 0.5, dtype=torch.float64)
        y = torch.randn(POINTS, 1, generator=random, dtype=torch.float64)
        loglik = (-0.5 * ((y - means) ** 2 / variances + (2 * math.pi * variances).log())).sum(-1)
        epistemic = None if predictive == "draws" else torch.full((POINTS, 1), 0.1, dtype=torch.float64)
        return SplitEvaluation(ids, loglik, y, means=means, variances=variances, epistemic=epistemic)

    other = dataclasses.replace(split(2000), loglik=None, targets=None)
    splits = {"test": split(0), "val": split(1000), "ood/other": other}
    splits |= {"shift/clean/0": split(0), "shift/rotation/30": split(3000)}
    log_weights = torch.zeros(draws, dtype=torch.float64)
    return Evaluation(kind, predictive, False, predictive == "draws", log_weights, splits)


def check_metric(metric: Metric) -> None:
    """The whole contract of a metric, on evaluations of both kinds of task, from draws and in closed form.

    - It returns a list of `Score`, empty where it does not apply, with plain numbers and a known status.
    - It is a pure function of the evaluation and the seed: same result again, nothing changed, no global randomness.
    - It applies to one kind of task at least.

    Raises:
        AssertionError: saying which line of the contract does not hold.
    """
    name = type(metric).__name__
    require(dataclasses.is_dataclass(metric), f"{name} must be a frozen dataclass whose fields are its YAML's keys.")
    require(isinstance(metric, Metric), f"{name} must be callable with an evaluation and a seed.")
    applied = 0
    for kind in ("regression", "classification"):
        for predictive in ("draws", "closed_form"):
            evaluation = make_evaluation(kind, predictive)
            state = torch.random.get_rng_state()
            first, second = metric(evaluation, 3), metric(make_evaluation(kind, predictive), 3)
            pure = f"{name} must be a pure function of the evaluation and the seed"
            require(repr(first) == repr(second), f"{pure}; two calls gave {first} and {second}.")
            require(repr(metric(evaluation, 3)) == repr(first), f"{pure}; it has changed the evaluation.")
            unchanged = torch.equal(state, torch.random.get_rng_state())
            require(unchanged, f"{pure}; it has used torch's global generator. Use generator(seed, NAME).")
            for score in first:
                check_score(score, name)
            applied += len(first)
    require(applied > 0, f"{name} must have a score for one kind of task at least; got none.")


def check_score(score: Score, name: str) -> None:
    """One score: plain numbers, a known direction and status, and a reason where it is not available."""
    require(isinstance(score, Score), f"{name} must return Score objects; got {score!r}.")
    require(type(score.value) is float, f"{name}: value must be a float, not a tensor; got {score.value!r}.")
    require(type(score.n) is int, f"{name}: n must be an int; got {score.n!r}.")
    require(
        score.better in ("higher", "lower", ""), f"{name}: better must be higher, lower or empty; got {score.better!r}."
    )
    known = get_args(ScoreStatus)
    require(score.status in known, f"{name}: status must be one of {', '.join(known)}; got {score.status!r}.")
    stated = math.isfinite(score.value) or (score.status in ("n/a", "not finite") and bool(score.note))
    require(
        stated,
        f"{name}: a value that is not finite must have the status n/a or not finite and its reason in `note`; got "
        f"{score}.",
    )
    reasoned = score.status != "n/a" or (math.isnan(score.value) and bool(score.note))
    require(reasoned, f"{name}: a score that is n/a must have the value NaN and its reason in `note`; got {score}.")
