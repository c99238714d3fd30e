"""An evidence below the log-likelihood of a predictor that ignores the inputs is flagged."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from bnn_runner.hyper.fixed import Fixed
from bnn_runner.laplace.evidence import constant_facts, constant_log_likelihood
from bnn_runner.methods.laplace import Laplace
from bnn_runner.methods.laplace_sampled import LaplaceSampled
from tests.laplace.test_identities import context, small


def test_the_constant_predictors_log_likelihood_by_another_route() -> None:
    """Planted bugs: standardised units; n - 1 in the variance; the log of the number of classes; per point."""
    task, _ = small("classification", num_train=30)
    y = task.train.targets
    assert y is not None
    frequency = torch.stack([(y == c).double().mean() for c in range(task.spec.num_outputs)])
    assert constant_log_likelihood(task) == pytest.approx(float(frequency[y].log().sum()))
    some = replace(task, train=replace(task.train, targets=torch.zeros_like(y)))
    assert constant_log_likelihood(some) == 0  # one class only: 0 log 0 is 0

    task, _ = small("regression", num_train=30)
    y = task.train.targets
    assert y is not None
    task = replace(task, target_scale=torch.full_like(task.target_scale, 7.0))
    original = 7 * y.double()
    normal = torch.distributions.Normal(original.mean(0), original.std(0, correction=0))
    assert constant_log_likelihood(task) == pytest.approx(float(normal.log_prob(original).sum()))


def test_a_flag_and_a_note_in_the_row() -> None:
    """Planted bugs: flagged where it is above; a flag that stays where the evidence is omitted."""
    task, network = small("classification", num_train=30)
    strong, weak = (Laplace(structure="full").fit(task, [network], context(Fixed(p))).report for p in (1.0, 1e8))
    constant = constant_log_likelihood(task)
    for report in (strong, weak):
        below = report.facts["evidence_nats"] < constant
        assert report.facts["evidence_below_constant"] is below and report.facts["constant_loglik_nats"] == constant
        assert any("below the log-likelihood of a constant predictor" in n for n in report.notes) is below
    assert weak.facts["evidence_below_constant"], "the penalty of w* under this prior is huge"
    omitted = LaplaceSampled(probes=0).fit(task, [network], context(Fixed(1e8))).report
    assert "evidence_nats" not in omitted.facts and "evidence_below_constant" not in omitted.facts


def test_targets_that_do_not_vary_flag_nothing() -> None:
    """A Gaussian of variance 0 has an infinite density. Planted bug: every evidence is below it."""
    task, _ = small("regression", num_train=30)
    assert task.train.targets is not None
    task = replace(task, train=replace(task.train, targets=torch.zeros_like(task.train.targets)))
    facts, notes = constant_facts(-5.0, task, at_optimum=True)
    assert facts["constant_loglik_nats"] == math.inf and not facts["evidence_below_constant"] and not notes
