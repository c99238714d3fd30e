import math

import pytest

from bnn_runner.report.console import centre_line, score_table
from bnn_runner.report.read_cells import ScoreRow

NATS = {"better": "higher", "unit": "nats per block"}


def test_groups_values_and_remarks():
    scores = [
        ScoreRow("ood_auroc", 0.9, split="ood/far", n=20, better="higher"),
        ScoreRow("marginal_loglik", -0.5, 0.01, n=100, better="higher", unit="nats per point"),
        ScoreRow("joint_loglik", -5.0, 0.1, n=10, tau=10, draws=40, status="not converged", **NATS),
        ScoreRow("joint_loglik_at_draws", -7.0, 0.1, n=10, tau=10, draws=10, **NATS),
        ScoreRow("joint_loglik_at_draws", -6.0, 0.1, n=10, tau=10, draws=20, **NATS),
        ScoreRow("joint_loglik_at_draws", -5.0, 0.1, n=10, tau=10, draws=40, **NATS),
        ScoreRow("joint_loglik_effective_draws", 3.2, 0.1, n=10, tau=10, draws=40),
        ScoreRow("joint_loglik_exact", -4.9, 0.1, n=10, tau=10, **NATS),
        ScoreRow("ece", math.nan, n=100),
        ScoreRow("brier", math.nan, status="n/a", note="no probabilities"),
    ]
    text = score_table(scores, width=140)
    order = ["fit", "marginal_loglik", "joint log-likelihood", "calibration", "ece", "out of distribution", "ood_auroc"]
    places = [text.index(word) for word in order]
    assert places == sorted(places)
    assert "-0.500 ± 0.010" in text
    assert "not converged; S/4 -7, S/2 -6; 3.2 effective draws; exact -4.9" in text
    assert "NaN" in text
    assert "not finite" in text
    assert "n/a" in text
    assert "no probabilities" in text
    assert "at_draws" not in text
    assert "_exact" not in text


def test_a_converged_score_has_no_remark_and_a_centre_only_where_it_differs():
    """Planted bugs: five lines of remarks under a score that is in order; a difference of 1e-9 as news."""
    joint = [ScoreRow("joint_loglik", -5.0, 0.1, n=10, tau=10, draws=40, **NATS)]
    joint += [ScoreRow("joint_loglik_at_draws", -5.0, 0.1, n=10, tau=10, draws=s, **NATS) for s in (10, 20, 40)]
    joint += [ScoreRow("joint_loglik_effective_draws", 3.2, 0.1, n=10, tau=10, draws=40)]
    assert next(x for x in score_table(joint).splitlines() if "joint_loglik" in x).endswith("10")
    own = ScoreRow("marginal_loglik", -0.5, 0.02, n=100, better="higher", unit="nats per point")
    centre = ScoreRow("centre_marginal_loglik", -0.6, 0.02, n=100, better="higher", unit="nats per point")
    for apart, gap in ((0.1, "posterior +0.100 ± 0.010"), (-0.1, "posterior -0.100 ± 0.010"), (1e-6, "the same")):
        row = ScoreRow("marginal_loglik_minus_centre", apart, abs(apart) / 10, n=100, unit="nats per point")
        assert centre_line([own, centre, row]) == f"centre alone: marginal_loglik -0.6000 ({gap})"
    assert centre_line([own]) == ""


@pytest.mark.parametrize("width", [80, 100, 140])
def test_width_is_kept(width):
    scores = [ScoreRow("rmse", 1.0, 0.1, n=100, status="n/a", note="a long reason " * 20)]
    lines = score_table(scores, width=width).splitlines()
    assert max(map(len, lines)) <= width
    assert len(lines) > 3


def test_an_exact_score_says_so_and_its_estimate_only_where_it_has_not_converged():
    by_draws = ScoreRow("joint_loglik_by_draws", -7.0, 0.1, n=10, tau=10, draws=40, **NATS)
    for status, remark in (("ok", "exact"), ("not converged", "exact; -7 from draws, not converged")):
        scores = [ScoreRow("joint_loglik", -5.0, 0.1, n=10, tau=10, **NATS), by_draws._replace(status=status)]
        (line,) = [x for x in score_table(scores, width=200).splitlines() if "joint_loglik" in x]
        assert line.endswith(f"  {remark}")


def test_many_block_sizes_are_three_lines():
    scores = [ScoreRow("joint_loglik", -1.0 * t, n=10, tau=t) for t in range(1, 11)]
    text = score_table(scores, width=100)
    assert [f"tau={t} " in text for t in range(1, 11)] == [t in (2, 6, 10) for t in range(1, 11)]


def test_no_scores():
    assert score_table([], width=80) == "no scores"
