"""Sampled Laplace against the exact posterior of the same curvature (float64)."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch

from bnn_runner.base import Network
from bnn_runner.curvature.ggn_operator import GGNOperator
from bnn_runner.curvature.jacobians import Jacobians
from bnn_runner.curvature.output_curvature import OutputCurvature
from bnn_runner.curvature.structures import fit_structure
from bnn_runner.curvature.training_passes import TrainingPasses
from bnn_runner.errors import RunFailed
from bnn_runner.hyper.evidence import Evidence
from bnn_runner.hyper.fixed import Fixed
from bnn_runner.hyper.fixed_point import FixedPoint
from bnn_runner.laplace import log_det, sampled
from bnn_runner.laplace.log_det import Quadrature, Spectrum
from bnn_runner.laplace.sampled import SampledCurvature
from bnn_runner.laplace.solvers import ConjugateGradients
from bnn_runner.methods.laplace import Laplace
from bnn_runner.methods.laplace_sampled import LaplaceSampled
from bnn_runner.models.mlp import MLP
from bnn_runner.rng import generator
from bnn_runner.tasks import Task
from tests.curvature.test_float32 import converted
from tests.laplace.test_identities import dense_jacobian, small
from tests.problems import context, make_network, make_task

SGD = LaplaceSampled(solver="sgd", sgd_passes=250, sgd_batch_size=5, samples=2, probes=0)
CG = LaplaceSampled(tolerance=1e-3, samples=2, probes=0)
METHODS = {
    "cg": (CG, "regression", False),
    "cg, classes": (CG, "classification", False),
    "cg, rows recomputed": (CG, "classification", True),
    "sgd": (SGD, "classification", False),
    "sgd, noisy targets": (replace(SGD, objective="noisy_targets"), "regression", False),
}


@pytest.fixture
def quadrature(monkeypatch: pytest.MonkeyPatch) -> None:
    """No log determinant is exact."""
    monkeypatch.setattr(log_det, "EXACT_ROWS", 0)


@pytest.mark.parametrize("name", METHODS)
def test_draws_have_the_covariance_of_the_whole_curvature(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Random projections of the weights, and the outputs at test points, at 5 standard errors; unequal precisions.

    Planted bugs: no prior noise; noise ε without its root R; Λ for Λ^½; a minibatch's sum not scaled to N;
    softmax's root squared.
    """
    method, kind, recomputed = METHODS[name]
    if recomputed:
        monkeypatch.setattr("bnn_runner.runtime.memory.KEPT_BYTES", 0)
    task, network = small(kind, layerwise=True)
    if kind == "classification":  # a prior weak enough for the data to be seen
        network = replace(network, prior_precision={n: 0.1 * v for n, v in network.prior_precision.items()})
    exact = Laplace(structure="full").fit(task, [network], context(Fixed())).gaussian
    posterior = method.fit(task, [network], context(Fixed()))
    count = 150 if recomputed else 600
    monkeypatch.setattr(sampled, "draws_at_once", lambda size: count)
    draws = posterior.gaussian.sample(1, 0, count)
    random = torch.randn(25, draws.shape[1], generator=generator(0, "projections"), dtype=torch.float64)
    directions = torch.cat([random, dense_jacobian(network, task.test.inputs)])
    variances = (directions @ exact.product(directions).T).diagonal()
    found = (draws @ directions.T).square().mean(0)
    scores = (found / variances - 1) / (2 / count) ** 0.5
    assert float(scores.abs().max()) < 5
    means = (draws @ directions.T).mean(0) / (variances / count).sqrt()
    assert float(means.abs().max()) < 5


def test_the_stated_error_bounds_the_true_one() -> None:
    """Against the exact solution in every random direction. Planted bugs: the recursion's residual; ‖r‖ without Λ."""
    task, network = small("classification", layerwise=True)
    exact = Laplace(structure="full").fit(task, [network], context(Fixed())).gaussian
    for method in (LaplaceSampled(passes=6), LaplaceSampled(tolerance=0.05), replace(SGD, sgd_passes=10)):
        posterior = method.fit(task, [network], context(Fixed()))
        precise = replace(method, solver="cg", tolerance=1e-9, passes=500).fit(task, [network], context(Fixed()))
        error = posterior.gaussian.sample(0, 0, 2) - precise.gaussian.sample(0, 0, 2)
        precisions = torch.tensor(posterior.gaussian.precisions, dtype=torch.float64)
        rows = posterior.gaussian.rows
        h = GGNOperator.product(rows, torch.eye(rows.size, dtype=torch.float64))
        each = precisions.repeat_interleave(torch.tensor([p.numel() for p in network.parameters.values()]))
        energy = (error * (error @ (h + torch.diag(each)))).sum(1).sqrt()  # the largest error of any direction, in sd
        bound = posterior.report.facts["sample_error_sd"]
        assert 1e-6 < float(energy.max()) <= bound
        assert bound <= 0.05 or posterior.report.facts["solver"] != "cg" or posterior.report.notes
        random = torch.randn(50, rows.size, generator=generator(0, "projections"), dtype=torch.float64)
        spread = (random @ exact.product(random).T).diagonal().sqrt()
        assert float(((error @ random.T) / spread).abs().max()) <= bound


def test_draws_that_descent_has_not_found_are_told() -> None:
    """Planted bug: only conjugate gradients say how far off they are."""
    task, network = small("classification", layerwise=True)
    for passes, told in ((3, True), (250, False)):
        report = replace(SGD, sgd_passes=passes).fit(task, [network], context(Fixed())).report
        assert (report.facts["sample_error_sd"] > 1) == told
        assert any("do not represent the posterior" in note for note in report.notes) == told


@pytest.mark.parametrize("kind", ["regression", "classification"])
def test_effective_dimensions_and_the_log_determinant_are_the_exact_ones(kind: str) -> None:
    """Every group's within 3 standard errors, at strong and weak precisions (warm-started), equal and not.

    Planted bugs: n_g·n_g left out; the last precision's Λ^½; a probe's weights not scaled to P; ghosts of the
    Lanczos process counted twice; the standard error of one sample.
    """
    task, network = small(kind, num_train=60)
    exact, sampled = (fitted_curvature(m, task, network) for m in ("full", "sampled"))
    groups = len(exact.groups)
    for precisions in (torch.full((groups,), 5.0), torch.full((groups,), 0.05), torch.linspace(0.1, 3, groups)):
        at = precisions.double()
        samples = sampled.dimension_samples(at)
        scores = (samples.mean(0) - exact.effective_dimensions(at)) / (samples.std(0) / len(samples) ** 0.5)
        assert samples.shape == (200, groups) and float(scores.abs().max()) < 3
        assert bool((samples.var(0) < 3 * exact.effective_dimensions(at)).all()), "a variance of 2 γ at most"
        estimates = sampled.log_det_samples(at)
        error = float(estimates.std()) / len(estimates) ** 0.5
        ratio = float(exact.log_det_ratio(at))
        assert abs(float(estimates.mean()) - ratio) < 3 * error < 0.5 * ratio


def fitted_curvature(name: str, task: Task, network: Network) -> Any:
    """The curvature that a fit makes of the task, full or sampled (200 samples, 24 probes)."""
    jacobians = Jacobians(network)
    output, ignored = OutputCurvature(), lambda stage, done, total: None
    if name == "full":
        passes = TrainingPasses(task, jacobians, output)
        return fit_structure("full", passes)
    rows = GGNOperator.of(task, jacobians, output, ignored)
    return SampledCurvature(rows, ConjugateGradients(1e-3, 500), 0, 200, Spectrum(rows, 0, 24, 60), torch.float64)


@pytest.mark.parametrize("family", ["isotropic", "layerwise"])
@pytest.mark.usefixtures("quadrature")
def test_the_fixed_point_is_the_exact_one_within_its_standard_error(family: Any) -> None:
    """MacKay's fixed point from samples (EM's M step), from a start far off. Planted bug: γ at the start."""
    task, network = small("classification", num_train=60)
    network = replace(network, parameters={n: 0.7 * p for n, p in network.parameters.items()})
    rule = FixedPoint(family=family)
    exact = Laplace(structure="full").fit(task, [network], context(rule)).report.facts
    sampled = LaplaceSampled(samples=48, probes=24).fit(task, [network], context(rule)).report.facts
    assert sampled["hyper_samples"] == 48 and sampled["hyper_status"] == exact["hyper_status"]
    error = sampled["hyper_log_standard_error"]
    assert error > 0
    if family == "isotropic":
        assert error < 0.15
        assert abs(math.log(sampled["prior_precision"] / exact["prior_precision"])) < 3 * error
        assert abs(sampled["evidence_nats"] - exact["evidence_nats"]) < 3 * sampled["evidence_standard_error_nats"]
        return
    for name, value in exact["prior_precisions"].items():
        assert abs(math.log(sampled["prior_precisions"][name] / value)) < 3 * error


def test_too_few_samples_are_told() -> None:
    """Planted bugs: the note of every rule; the standard error not shrinking with S."""
    task, network = small("classification")
    few = LaplaceSampled(samples=2, probes=2).fit(task, [network], context(FixedPoint(family="layerwise"))).report
    assert any("samples are too few for the precision of" in note and "method.samples" in note for note in few.notes)
    many = LaplaceSampled(samples=200, probes=2).fit(task, [network], context(FixedPoint())).report
    assert not any("too few" in note for note in many.notes)
    fixed = LaplaceSampled(samples=2, probes=2).fit(task, [network], context(Fixed())).report
    assert not any("too few" in note for note in fixed.notes)


@pytest.mark.parametrize("kind", ["regression", "classification"])
@pytest.mark.usefixtures("quadrature")
def test_the_tangent_model_s_optimum_is_reached_with_solved_products(kind: str) -> None:
    """mode=tangent: v* is that of the full curvature, whose log-likelihood is compared. Planted bug: an absolute
    tolerance of the products that precondition, which leaves short ones zero."""
    task, network = small(kind, layerwise=True)
    exact = Laplace(structure="full", mode="tangent").fit(task, [network], context(Fixed())).report.facts
    sampled = LaplaceSampled(mode="tangent", probes=16).fit(task, [network], context(Fixed())).report.facts
    assert sampled["tangent_settled"] and sampled["mode"] == "tangent"
    assert sampled["train_loglik_nats"] == pytest.approx(exact["train_loglik_nats"], rel=1e-6)
    assert abs(sampled["evidence_nats"] - exact["evidence_nats"]) < 4 * sampled["evidence_standard_error_nats"]
    assert sampled["newton_decrement_nats"] == pytest.approx(exact["newton_decrement_nats"], rel=0.02)


@pytest.mark.usefixtures("quadrature")
def test_the_evidence_by_gradient_is_the_best_of_the_sampled_spectrum() -> None:
    """hyper=evidence climbs the quadrature, whose derivative in log λ is −½ (γ − λ‖w‖²) with the quadrature's γ."""
    task, network = small("regression", num_train=30)
    exact = Laplace(structure="full").fit(task, [network], context(Evidence())).report.facts
    sampled = LaplaceSampled(probes=64, samples=8).fit(task, [network], context(Evidence())).report.facts
    assert sampled["hyper_status"] == "converged"
    assert abs(sampled["evidence_nats"] - exact["evidence_nats"]) < 3 * sampled["evidence_standard_error_nats"]
    assert sampled["evidence_truncation_nats"] < max(0.05, sampled["evidence_standard_error_nats"])
    assert sampled["prior_precision"] == pytest.approx(exact["prior_precision"], rel=0.3)


def hard_problem() -> tuple[Task, Network]:
    """A spectrum of many orders of magnitude beside a null space."""
    task = make_task("regression", (2,), 1, num_train=60)
    return task, make_network(MLP(hidden=(20, 20), activation="tanh"), task, noise=0.01)


@pytest.mark.parametrize("precision", [1e2, 1.0, 1e-2])
def test_the_bounds_hold_and_meet(precision: float) -> None:
    """Each probe's own zᵀ log(I + H/λ) z, by an eigendecomposition, lies between Gauss-Radau's and Gauss's value.

    Planted bugs: the node of Radau's rule at the wrong end; the last off-diagonal left out; P left out.
    """
    task, network = hard_problem()
    rows = GGNOperator.of(task, Jacobians(network), OutputCurvature(), lambda stage, done, total: None)
    h = rows.product(torch.eye(rows.size, dtype=torch.float64))
    values, vectors = torch.linalg.eigh(h)
    probes = torch.stack([Spectrum(rows, 0, 4, 500)._signs(q) for q in range(4)]).double()
    exact = (probes @ vectors).square() @ torch.log1p(values.clamp_min(0) / precision)
    at = torch.tensor([precision], dtype=torch.float64)
    widths = []
    for steps in (5, 20, 60, 400):
        process = Quadrature(rows.product, probes / rows.size**0.5, steps)
        process._continue(steps)
        bracket = process._now(at)
        slack = 1e-6 * exact
        assert bool((bracket.lower <= exact + slack).all()) and bool((exact <= bracket.upper + slack).all())
        widths.append(max(bracket.truncation, 1e-9))
    assert widths == sorted(widths, reverse=True) and widths[0] > 10 * widths[-1]
    found = Quadrature(rows.product, probes / rows.size**0.5, 500).bracket(at)
    assert found.close and abs(float((found.samples - exact).mean())) <= 4 * found.truncation


def test_few_rows_have_an_exact_evidence() -> None:
    """Value, search, and unequal precisions are those of the full curvature. Planted bug: quadrature in 50 steps."""
    task, network = hard_problem()
    for rule in (Fixed(0.1), Evidence(), FixedPoint(family="layerwise")):
        exact = Laplace(structure="full").fit(task, [network], context(rule)).report.facts
        sampled = LaplaceSampled(tolerance=1e-3).fit(task, [network], context(rule)).report.facts
        assert sampled["evidence_status"] == "exact" and sampled["evidence_standard_error_nats"] == 0
        if isinstance(rule, FixedPoint):
            continue
        assert sampled["evidence_nats"] == pytest.approx(exact["evidence_nats"], abs=1e-4)
        assert sampled["prior_precision"] == pytest.approx(exact["prior_precision"], rel=1e-5)


@pytest.mark.usefixtures("quadrature")
def test_the_error_of_the_evidence_covers_the_exact_one() -> None:
    """Planted bug: 50 steps and the probes' standard error alone, which miss it by tens of nats."""
    task, network = hard_problem()
    for precision in (1.0, 0.1, 0.01):
        exact = Laplace(structure="full").fit(task, [network], context(Fixed(precision))).report.facts
        sampled = LaplaceSampled(tolerance=1e-2, probes=16).fit(task, [network], context(Fixed(precision))).report.facts
        assert sampled["evidence_status"] == "bounded"
        assert sampled["evidence_truncation_nats"] <= sampled["evidence_standard_error_nats"]
        assert abs(sampled["evidence_nats"] - exact["evidence_nats"]) < 3 * sampled["evidence_standard_error_nats"]


@pytest.mark.usefixtures("quadrature")
def test_what_is_not_bounded_is_no_evidence() -> None:
    """Planted bugs: the value shown all the same; a search that climbs it."""
    task, network = hard_problem()
    method = LaplaceSampled(lanczos_steps=5)
    report = method.fit(task, [network], context(Fixed(0.01))).report
    exact = Laplace(structure="full").fit(task, [network], context(Fixed(0.01))).report.facts["evidence_nats"]
    assert "evidence_nats" not in report.facts and report.facts["evidence_status"] == "not bounded"
    low, high = report.facts["evidence_bounds_nats"]
    assert low - 20 < exact < high + 20 and any("evidence is omitted" in note for note in report.notes)
    with pytest.raises(RunFailed, match=r"hyper=evidence requires a bounded evidence; got .* Use hyper=fixed_point"):
        method.fit(task, [network], context(Evidence()))
    assert method.fit(task, [network], context(FixedPoint())).report.facts["hyper_status"]


@pytest.mark.usefixtures("quadrature")
def test_a_float32_network_whose_rows_are_not_kept_has_the_same_evidence(monkeypatch: pytest.MonkeyPatch) -> None:
    """Planted bug: Lanczos vectors in float32, whose rounding fills the null space (hundreds of nats)."""
    task, network = converted(*hard_problem(), torch.float32)
    reports = []
    for keeps in (True, False):
        monkeypatch.setattr(GGNOperator, "keeps", property(lambda self, keeps=keeps: keeps))
        method = LaplaceSampled(samples=2, passes=5)
        reports.append(method.fit(task, [network], context(Fixed(1e-2))).report.facts)
    kept, single = reports
    assert kept["evidence_status"] == single["evidence_status"] == "bounded"
    allowed = 1e-3 + 2 * kept["evidence_truncation_nats"]
    assert single["evidence_nats"] == pytest.approx(kept["evidence_nats"], abs=allowed)
