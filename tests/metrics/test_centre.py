"""The centre's scores next to the posterior's: the same numbers as of the centre alone, and paired standard errors."""

from __future__ import annotations

import math
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from bnn_runner.base import centre_of
from bnn_runner.evaluation.io import load, save
from bnn_runner.metrics.accuracy import Accuracy
from bnn_runner.metrics.brier import Brier
from bnn_runner.metrics.crps import CRPS
from bnn_runner.metrics.dyadic import Dyadic
from bnn_runner.metrics.ece import CalibrationError
from bnn_runner.metrics.joint import Joint
from bnn_runner.metrics.marginal import Marginal, validation_against_centre
from bnn_runner.metrics.rmse import RMSE
from bnn_runner.metrics.shift import Shift
from bnn_runner.posteriors.networks import NetworkEnsemble
from bnn_runner.runs.against_centre import against_centre
from bnn_runner.scoring import Evaluation, Score, SplitEvaluation
from bnn_runner.testing.metrics import make_evaluation

METRICS: dict[str, Any] = {
    "classification": [
        Marginal(), Accuracy(), Brier(), CalibrationError(15), Joint([1, 2, 10], 3, 0.002),
        Dyadic([1, 2, 3], 10, 3, "uniform", 0.002),
    ],
    "regression": [Marginal(), RMSE(), CRPS(10**6), Joint([1, 2, 10], 3, 0.002)],
}  # fmt: skip


def with_centre(kind: Any, predictive: str = "draws") -> Evaluation:
    """An evaluation whose centre is one draw of another seed at the same points."""
    evaluation, other = make_evaluation(kind, predictive), make_evaluation(kind, "draws", seed=5)

    def first(split: SplitEvaluation, name: str) -> SplitEvaluation:
        one = {f: None if (t := getattr(split, f)) is None else t[:1] for f in ("loglik", "means", "variances")}
        targets = evaluation.splits[name].targets
        if kind == "regression":  # the centre is scored on the same targets
            assert one["means"] is not None and one["variances"] is not None
            square = (targets - one["means"]).square() / one["variances"]
            one["loglik"] = (-0.5 * (square + (2 * math.pi * one["variances"]).log())).sum(-1)
        else:
            assert one["loglik"] is not None
        probs = None if split.mean_probs is None else split.mean_probs
        return replace(split, targets=targets, mean_probs=probs, **one)  # type: ignore[arg-type]

    parts = {name: first(other.splits[name], name) for name in ("test", "val")}
    return replace(evaluation, centre=Evaluation(kind, "draws", True, True, torch.zeros(1), parts))


def rows(metric: Any, evaluation: Evaluation) -> dict[tuple[Any, ...], Score]:
    return {(s.metric, s.split, s.tau, s.kappa): s for s in metric(evaluation, 3) if "_at_draws" not in s.metric}


@pytest.mark.parametrize("kind", ["classification", "regression"])
@pytest.mark.parametrize("predictive", ["draws", "closed_form"])
def test_the_centres_rows_are_its_own_scores_and_the_posteriors_do_not_change(kind: str, predictive: str) -> None:
    """Planted bugs: the posterior's values under the centre's name; scores on other blocks; a posterior changed."""
    evaluation = with_centre(kind, predictive)
    assert evaluation.centre is not None
    count = 0
    for metric in METRICS[kind]:
        found, alone = rows(metric, evaluation), rows(metric, evaluation.centre)
        plain = rows(metric, replace(evaluation, centre=None))
        assert {k: s for k, s in found.items() if "centre" not in k[0]} == plain
        for (name, *rest), score in found.items():
            if name.startswith("centre_"):
                want = alone[(name.removeprefix("centre_"), *rest)]
                assert score.value == pytest.approx(want.value, rel=1e-12) and score.n == want.n
                assert score.standard_error == pytest.approx(want.standard_error, rel=1e-9, nan_ok=True)
                count += 1
            if name.endswith("_minus_centre"):
                own, centre = found[(name[:-13], *rest)], found[(f"centre_{name[:-13]}", *rest)]
                assert score.value == pytest.approx(own.value - centre.value, abs=1e-10)
    assert count >= 4


def test_the_differences_error_is_paired() -> None:
    """Planted bugs: the two errors in quadrature; errors over the repeats of a permutation."""
    evaluation = with_centre("classification", "closed_form")
    assert evaluation.centre is not None and evaluation.test.loglik is not None
    other = evaluation.centre.test.loglik
    assert other is not None
    apart = evaluation.test.loglik[0] - other[0]
    found = rows(Marginal(), evaluation)
    score = found[("marginal_loglik_minus_centre", "test", None, None)]
    assert score.standard_error == pytest.approx(float(apart.std()) / math.sqrt(len(apart)), rel=1e-12)
    # A shift that both share cancels: the error of the difference does not see it, those of the two do.
    shared = 30 * torch.randn(1, 60, generator=torch.Generator().manual_seed(0), dtype=torch.float64)

    def moved(part: Evaluation) -> Evaluation:
        splits = {n: replace(s, loglik=None if s.loglik is None else s.loglik + shared) for n, s in part.splits.items()}
        return replace(part, splits=splits)

    both = rows(Marginal(), replace(moved(evaluation), centre=moved(evaluation.centre)))
    again = both[("marginal_loglik_minus_centre", "test", None, None)]
    assert again.standard_error == pytest.approx(score.standard_error, rel=1e-9)
    assert both[("marginal_loglik", "test", None, None)].standard_error > 10 * score.standard_error


def test_shifted_points_are_not_compared_with_the_centre_of_others() -> None:
    """Planted bug: the centre's predictions for the test part next to those for the shifted points."""
    assert not [s.metric for s in Shift(15)(with_centre("classification"), 0) if "centre" in s.metric]


def test_the_centre_is_saved(tmp_path: Any) -> None:
    evaluation = with_centre("classification")
    save(evaluation, tmp_path)
    again = load(tmp_path)
    assert again.centre is not None and list(again.centre.splits) == ["test", "val"]
    assert [s.value for s in Marginal()(again, 0)] == [s.value for s in Marginal()(evaluation, 0)]
    save(replace(evaluation, centre=None), tmp_path)
    assert load(tmp_path).centre is None


def test_a_posterior_that_is_worse_on_validation_is_reported_with_choices_that_are_better() -> None:
    """Planted bugs: the test part; an unpaired error; grid named to one that uses it; MAP named to dropout."""
    evaluation = with_centre("classification")
    assert evaluation.centre is not None
    centre = evaluation.centre

    def ahead(nats: float) -> Evaluation:
        """The centre is the posterior's own marginal plus `nats`, with a little noise."""
        val = evaluation.splits["val"]
        assert val.loglik is not None
        noise = 0.1 * torch.randn(60, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
        own = torch.logsumexp(val.loglik, 0, keepdim=True) - math.log(len(val.loglik)) + nats + noise
        splits = {**centre.splits, "val": replace(centre.splits["val"], loglik=own)}
        return replace(evaluation, centre=replace(centre, splits=splits))

    def experiment(uses_hyper: bool, needs_validation: bool = False) -> Any:
        rule = SimpleNamespace(needs_validation=needs_validation)
        return SimpleNamespace(hyper=rule, uses_hyper=uses_hyper)

    facts, notes = against_centre(ahead(2.0), experiment(True))
    assert facts["worse_than_centre"] and facts["val_loglik_minus_centre"] < -1
    assert "method=map" in notes[0] and "hyper=grid" in notes[0] and f"{facts['val_loglik']:.3f}" in notes[0]
    assert "hyper=grid" not in against_centre(ahead(2.0), experiment(True, needs_validation=True))[1][0]
    assert "method=map" not in against_centre(ahead(2.0), experiment(False))[1][0]
    few = SimpleNamespace(value=-2.1, standard_error=1.0, n=15)  # 2.1 is below Student's 2.14 for 15 points
    with pytest.MonkeyPatch.context() as patch:
        for n, worse in ((15, False), (60, True)):
            few.n = n
            patch.setattr("bnn_runner.runs.against_centre.validation_against_centre", lambda e: (few, few, few))
            assert against_centre(evaluation, experiment(True))[0]["worse_than_centre"] is worse
    facts, notes = against_centre(ahead(-2.0), experiment(True))
    assert not facts["worse_than_centre"] and not notes
    assert against_centre(replace(evaluation, centre=None), experiment(True)) == ({}, [])
    assert validation_against_centre(replace(evaluation, splits={"test": evaluation.test})) is None


def test_only_an_ensemble_with_the_map_network_has_a_centre() -> None:
    network: Any = SimpleNamespace(likelihood=None)
    assert centre_of(NetworkEnsemble((network, network))) is None
