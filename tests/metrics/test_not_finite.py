"""Every number of the table that is not finite has a status and a reason, for every metric."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

from bnn_runner.metrics.causes import with_causes
from bnn_runner.scoring import Evaluation, GaussianJoint, Score, SplitEvaluation
from bnn_runner.testing import check_choice
from bnn_runner.testing.metrics import make_evaluation

FOLDER = Path(__file__).parents[2] / "conf"
METRICS = sorted(path.stem for path in (FOLDER / "metric").glob("*.yaml"))


def changed(evaluation: Evaluation, change: Callable[[SplitEvaluation], SplitEvaluation]) -> Evaluation:
    return dataclasses.replace(evaluation, splits={n: change(s) for n, s in evaluation.splits.items()})


def with_noise(evaluation: Evaluation, sigma: float) -> Evaluation:
    """Of a regression: the log-likelihoods and the exact joint of that noise."""

    def change(split: SplitEvaluation) -> SplitEvaluation:
        if split.means is None:
            return split
        variances = torch.full((1, 1, 1), sigma, dtype=torch.float64).square()
        loglik = split.loglik
        if split.targets is not None:
            terms = (split.targets - split.means).square() / variances + variances.log() + math.log(2 * math.pi)
            loglik = -0.5 * terms.sum(-1)
        epistemic = None if split.epistemic is None else 0 * split.epistemic
        return dataclasses.replace(split, variances=variances, loglik=loglik, epistemic=epistemic)

    found = changed(evaluation, change)
    if found.kind == "classification":
        return found
    assert found.test.means is not None
    draws = found.test.means.squeeze(-1)
    low_rank = draws.T @ draws / len(draws)
    joint = GaussianJoint(draws.mean(0), low_rank + sigma * sigma * torch.eye(len(low_rank), dtype=torch.float64))
    return dataclasses.replace(found, gaussian_joint=joint)


def filled(name: str, value: float, some: bool = True) -> Callable[[Evaluation], Evaluation]:
    """One field of every split with a value in some places, or all."""

    def change(split: SplitEvaluation) -> SplitEvaluation:
        old: Tensor | None = getattr(split, name)
        if old is None:
            return split
        new = old.clone()
        (new.flatten()[::7] if some else new.flatten()).fill_(value)
        return dataclasses.replace(split, **{name: new})

    return lambda evaluation: changed(evaluation, change)


def first_points(count: int) -> Callable[[Evaluation], Evaluation]:
    axes = {"loglik": 1, "means": 1}

    def change(split: SplitEvaluation) -> SplitEvaluation:
        values = {f.name: getattr(split, f.name) for f in dataclasses.fields(split) if f.name != "variances"}
        return dataclasses.replace(
            split, **{n: v.narrow(axes.get(n, 0), 0, count) for n, v in values.items() if v is not None}
        )

    return lambda evaluation: changed(evaluation, change)


def weighted(value: float) -> Callable[[Evaluation], Evaluation]:
    return lambda e: dataclasses.replace(e, log_weights=torch.full_like(e.log_weights, value))


DEGENERATE: dict[str, Callable[[Evaluation], Evaluation]] = {
    **{f"sigma {s:g}": lambda e, s=s: with_noise(e, s) for s in (1e-8, 1e-10, 1e-12, 1e-20, 1e-160, 0.0, 1e200)},
    "some loglik -inf": filled("loglik", -math.inf),
    "all loglik -inf": filled("loglik", -math.inf, some=False),
    "some loglik nan": filled("loglik", math.nan),
    "some loglik inf": filled("loglik", math.inf),
    "some means nan": filled("means", math.nan),
    "some means inf": filled("means", math.inf),
    "some probabilities nan": filled("mean_probs", math.nan),
    "some entropies nan": filled("mean_entropy", math.nan),
    "variances nan": filled("variances", math.nan, some=False),
    "draws without weight": weighted(-math.inf),
    "weights nan": weighted(math.nan),
    "one point": first_points(1),
    "two points": first_points(2),
}


@pytest.mark.parametrize("bad", DEGENERATE)
@pytest.mark.parametrize("metric", METRICS)
def test_what_is_not_finite_has_a_status_and_a_reason(metric: str, bad: str) -> None:
    """Planted bugs: NaN with status ok; a note that says nothing; a Cholesky error in place of a row."""
    make = check_choice(FOLDER, "metric", metric)
    for kind in ("regression", "classification"):
        for predictive in ("draws", "closed_form"):
            evaluation = DEGENERATE[bad](make_evaluation(kind, predictive))  # type: ignore[arg-type]
            for score in with_causes(make(evaluation, 0), evaluation):
                where = f"{kind} {predictive}: {score}"
                if math.isfinite(score.value) and not math.isinf(score.standard_error):
                    assert score.status in ("ok", "not converged"), where
                else:
                    assert score.status in ("n/a", "not finite") and len(score.note) > 20, where
                if score.status == "not finite" and bad.startswith("sigma") and score.split != "ood/other":
                    assert "likelihood.sigma" in score.note, where


def test_a_score_states_by_itself_that_it_is_not_finite() -> None:
    assert Score("a", 1.0).status == "ok"
    assert Score("a", math.nan).status == "not finite" and "nan" in Score("a", math.nan).note
    assert Score("a", -math.inf, status="not converged", note="few").note == "few; the value is -inf"
    assert Score("a", 1.0, math.inf).status == "not finite" and "standard error" in Score("a", 1.0, math.inf).note
    assert Score("a", math.nan, status="n/a", note="no draws").status == "n/a"
    fixed = dataclasses.replace(Score("a", math.nan), value=2.0, status="ok", note="")
    assert (fixed.status, fixed.note) == ("ok", "")


def test_the_cause_of_a_dyadic_score_under_no_noise_is_named() -> None:
    """`dyadic_loglik_exact` was NaN with status ok. Planted bug: a cause that is not looked for."""
    evaluation = with_noise(make_evaluation("regression"), 1e-12)
    scores = with_causes(check_choice(FOLDER, "metric", "dyadic")(evaluation, 0), evaluation)
    rows = [s for s in scores if s.metric.startswith("dyadic_loglik")]
    assert rows and all(math.isfinite(s.value) or "likelihood.sigma" in s.note for s in rows)
    assert not any(s.status == "ok" and not math.isfinite(s.value) for s in scores)
