"""Rules that change the prior in training: the evidence optimum of a linear model, resumed trainings, bad settings."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from scipy.optimize import minimize

from bnn_runner.base import Network
from bnn_runner.errors import Interrupted, UserError
from bnn_runner.experiment import load_experiment
from bnn_runner.hyper.training_rule import TrainingRule, TuningState
from bnn_runner.marglik.mackay_loop import MacKayLoop
from bnn_runner.marglik.network_evidence import NetworkEvidence
from bnn_runner.marglik.online import Online
from bnn_runner.methods.laplace import Laplace
from bnn_runner.models.likelihoods import NoiseRule
from bnn_runner.models.mlp import MLP
from bnn_runner.models.priors import Isotropic
from bnn_runner.runner import prepare
from bnn_runner.runs import cost_estimate
from bnn_runner.runs.session import Session
from bnn_runner.runtime.console import Console
from bnn_runner.runtime.signals import StopRequest
from bnn_runner.tasks import Task
from bnn_runner.training.cache import NetworkCache
from bnn_runner.training.engine import LaneTrainer
from bnn_runner.training.schedules import Schedule
from bnn_runner.training.state import Lane, TrainingConfig
from tests.problems import context, make_task

SIGMA = 0.6
CPU = torch.device("cpu")
EXACT = Schedule("sgd", epochs=300, batch_size=1000, lr=0.03, shape="constant", momentum=0.9)


def linear_task() -> Task:
    """A linear-Gaussian task with inputs of unequal scale and one target."""
    task = make_task("regression", (3,), 1, num_train=30)
    x = task.train.inputs * torch.tensor([1.0, 0.5, 1.5], dtype=torch.float64)
    y = x @ torch.tensor([[0.8], [-0.3], [0.05]], dtype=torch.float64) + 0.4 + SIGMA * torch.sin(7 * x[:, :1])
    train = replace(task.train, inputs=x, targets=y)
    return replace(task, train=train, target_scale=torch.tensor([1.7], dtype=torch.float64))


def training_config(
    rule: TrainingRule | None, schedule: Schedule = EXACT, precision: float = 5.0, **changes: Any
) -> TrainingConfig:
    """Of a linear model with fixed noise in float64, unless `changes` say otherwise."""
    noise = NoiseRule("fixed", SIGMA)
    made = TrainingConfig(MLP(hidden=()), schedule, Isotropic(precision), noise, dtype=torch.float64, rule=rule)
    return replace(made, **changes)


def trained(made: TrainingConfig, task: Task) -> Network:
    return LaneTrainer(made, [Lane(task, 3, "key")], CPU).train(None, lambda *_: None)[0]


def linear_evidence(logs: Any, task: Task) -> float:
    """Log p(y) under y ~ N(0, Φ Λ⁻¹ Φᵀ + σ²) in original units; precisions of the weights and of the bias."""
    x, y = task.train.inputs.numpy(), task.train.targets.numpy()  # type: ignore[union-attr]
    scale = float(task.target_scale)
    weight, bias = np.exp(logs[0]), np.exp(logs[-1])
    features = np.concatenate([x / math.sqrt(weight), np.ones((len(x), 1)) / math.sqrt(bias)], 1)
    covariance = scale**2 * features @ features.T + SIGMA**2 * np.eye(len(x))
    quadratic = float((scale * y[:, 0]) @ np.linalg.solve(covariance, scale * y[:, 0]))
    return -0.5 * (quadratic + float(np.linalg.slogdet(2 * math.pi * covariance)[1]))


@pytest.mark.parametrize("family", ["isotropic", "layerwise"])
def test_the_loop_ends_at_the_evidence_optimum_of_a_linear_model(family: Any) -> None:
    """Planted bugs: the retraining under the old precision (the decay not taken up); γ with the start's λ; a loop of
    one round; the target's scale left out of the noise."""
    task = linear_task()
    network = trained(training_config(MacKayLoop(family=family, rounds=40, tolerance=1e-7, retrain_epochs=200)), task)
    start = np.zeros(1 if family == "isotropic" else 2)
    found = minimize(lambda logs: -linear_evidence(logs, task), start, tol=1e-12)
    expected = np.exp(found.x)
    precisions = [network.prior_precision[n] for n in ("out.weight", "out.bias")]
    np.testing.assert_allclose(precisions, [expected[0], expected[-1]], rtol=1e-4)
    last = network.tuning[-1]
    assert last["evidence_nats"] == pytest.approx(-found.fun, abs=1e-7)
    assert len(network.tuning) < 40 and last["largest_move"] <= 1e-7
    # The posterior stands on the network and the precisions of the training.
    posterior = Laplace(structure="full").fit(task, [network], context(MacKayLoop(family=family)))
    assert posterior.report.facts["evidence_nats"] == pytest.approx(-found.fun, abs=1e-7)
    assert posterior.report.facts["newton_decrement_nats"] < 1e-8


def test_online_steps_are_adam_on_the_evidence_and_the_last_one_is_kept() -> None:
    """Against torch's own Adam on autograd's gradient of the dense evidence at the same weights.

    Planted bugs: moments forgotten between updates; λ climbed instead of log λ; γ without its half."""
    task, rule = linear_task(), Online(steps=4, lr=0.2, structure="full", keep="last")
    network = trained(training_config(None, replace(EXACT, epochs=5)), task)
    state = TuningState(dict(network.prior_precision))
    for epoch in (1, 2):
        rule.update(replace(network, prior_precision=dict(state.precisions)), task, state, epoch, 0)
    x = task.train.inputs
    features = torch.cat([x, torch.ones(len(x), 1, dtype=torch.float64)], 1) * (float(task.target_scale) / SIGMA)
    w = torch.cat([network.parameters["out.weight"].flatten(), network.parameters["out.bias"]])
    logs = torch.full((2,), math.log(5.0), dtype=torch.float64, requires_grad=True)
    adam = torch.optim.Adam([logs], lr=0.2)
    for _ in range(8):
        diagonal = logs.exp()[torch.tensor([0, 0, 0, 1])]
        hessian = features.T @ features + torch.diag(diagonal)
        loss = 0.5 * ((diagonal * w.square()).sum() + torch.logdet(hessian) - diagonal.log().sum())
        adam.zero_grad()
        loss.backward()
        adam.step()
    found = [state.precisions["out.weight"], state.precisions["out.bias"]]
    np.testing.assert_allclose(found, logs.exp().detach().numpy(), rtol=1e-8)


def test_online_ends_at_the_evidence_optimum_of_a_linear_model() -> None:
    task = linear_task()
    network = trained(training_config(Online(structure="full", steps=20, lr=0.05), replace(EXACT, epochs=120)), task)
    found = minimize(lambda logs: -linear_evidence(logs, task), np.zeros(2), tol=1e-12)
    assert network.tuning[-1]["evidence_nats"] == pytest.approx(-found.fun, abs=1e-3)
    assert network.tuning[0]["evidence_nats"] < -found.fun - 1


def test_the_weights_of_the_largest_evidence_are_kept_with_their_precisions() -> None:
    """Trained on far past the best moment under a rising rate. Planted bugs: the last weights under the best ones'
    precisions; the best of the first update for ever."""
    task = linear_task()
    rough = Schedule("sgd", epochs=12, batch_size=7, lr=0.02, warmup_epochs=12, momentum=0.9)
    ends = {}
    for keep in ("best", "last"):
        rule = Online(structure="full", steps=20, keep=keep)
        network = trained(training_config(rule, rough), task)
        again = NetworkEvidence("full").at(network, task, 0)
        ends[keep] = float(again.evidence(again.start))
        rows = [row["evidence_nats"] for row in network.tuning]
        assert ends[keep] == pytest.approx(max(rows) if keep == "best" else rows[-1], abs=1e-9)
    assert ends["best"] > ends["last"]


def test_a_subset_and_sampled_targets_estimate_the_curvature_of_all_points() -> None:
    """γ over many seeds against that of all points. Planted bugs: no factor N/M; one subset for all updates."""
    task = make_task("classification", (3,), 3, num_train=60)
    network = trained(training_config(None, replace(EXACT, epochs=2), noise=NoiseRule()), task)
    strong = torch.tensor([1e4, 1e4], dtype=torch.float64)  # γ is linear in H there
    exact = NetworkEvidence("diag").at(network, task, 0).effective_dimensions(strong)
    rough = NetworkEvidence("diag", "mc_fisher", points=20)
    found = torch.stack([rough.at(network, task, seed).effective_dimensions(strong) for seed in range(60)])
    error = found.std(0) / 60**0.5
    assert bool((error > 0).all()) and bool(((found.mean(0) - exact).abs() < 4 * error + 1e-3 * exact).all())


def classifier(rule: TrainingRule | None) -> TrainingConfig:
    """A small network for three classes, with batchnorm and minibatches in float32."""
    return training_config(
        rule,
        Schedule("adam", epochs=6, batch_size=10, lr=0.02, warmup_epochs=1),
        model=MLP(hidden=(5,), norm="batch"),
        noise=NoiseRule(),
        dtype=torch.float32,
    )


def classes() -> Task:
    task = make_task("classification", (3,), 3, num_train=40)
    return task.to(CPU, torch.float32)


RULES: list[TrainingRule] = [
    MacKayLoop(family="layerwise", rounds=3, retrain_epochs=2, tolerance=1e-6),
    Online(burn_in=1, frequency=2, steps=5, lr=0.3, curvature="mc_fisher", points=25),
]


@pytest.mark.parametrize("rule", RULES, ids=lambda r: type(r).__name__)
@pytest.mark.parametrize("stop_at", [14, 23])
def test_a_resumed_training_ends_bit_for_bit_where_an_undisturbed_one_does(
    rule: TrainingRule, stop_at: int, tmp_path: Path
) -> None:
    """Planted bugs: precisions, or the rule's own numbers, that are left out of the checkpoint; the prior of the start
    taken up again."""
    task, made, steps = classes(), classifier(rule), 0
    whole = trained(made, task)
    assert len(whole.tuning) == 3

    def count(*_: Any) -> None:
        nonlocal steps
        steps += 1

    checkpoint = tmp_path / "partial.pt"
    with pytest.raises(Interrupted):
        LaneTrainer(made, [Lane(task, 3, "key")], CPU).train(checkpoint, count, lambda: steps >= stop_at)
    group = LaneTrainer(made, [Lane(task, 3, "key")], CPU)
    assert group.resume(checkpoint) == stop_at
    again = group.train(checkpoint, count)[0]
    for name, value in whole.parameters.items():
        assert torch.equal(value, again.parameters[name]), name
    assert again.tuning == whole.tuning and again.prior_precision == whole.prior_precision


@pytest.mark.parametrize("rule", RULES, ids=lambda r: type(r).__name__)
def test_buffers_modes_and_batches_are_those_of_a_training_without_the_rule(rule: TrainingRule) -> None:
    """Until the first update the path is the plain one: a fit moves no running statistic, mode or random number.

    Planted bugs: the curvature taken in training mode; an order of points drawn from a stream that the fit has used."""
    task = classes()
    plain = LaneTrainer(classifier(None), [Lane(task, 3)], CPU)
    ruled = LaneTrainer(classifier(rule), [Lane(task, 3)], CPU)
    with plain.training_mode(), ruled.training_mode():
        for _ in range(8):
            plain.advance(), ruled.advance()
        before = ruled.network(0)
        rule.update(before, task, ruled.state.tuning, 2, 3)  # type: ignore[arg-type]
        assert ruled.module.training
        for _ in range(8):
            plain.advance(), ruled.advance()
    for name, b in plain.state.buffers.items():
        assert torch.equal(b, ruled.state.buffers[name]), name
    for name, p in plain.state.parameters.items():
        assert torch.equal(p, ruled.state.parameters[name]), name


def test_the_trace_comes_back_from_the_cache(tmp_path: Path) -> None:
    task, made = classes(), classifier(RULES[0])
    network = trained(made, task)
    cache = NetworkCache(tmp_path)
    cache.store(network)
    found = cache.load("key", made.build(task.spec), CPU, torch.float32)
    assert found is not None and found.tuning == network.tuning and len(found.tuning) == 3
    assert found.prior_precision == network.prior_precision


def test_several_networks_are_trained_one_after_the_other() -> None:
    task = classes()
    group = LaneTrainer(classifier(RULES[0]), [Lane(task, 3), Lane(task, 4)], CPU)
    assert group.strategy == "loop"


def test_settings_that_make_no_loop_are_refused() -> None:
    with pytest.raises(UserError, match="rounds") as refused:
        MacKayLoop(rounds=0, retrain_epochs=0, tolerance=2.0, fisher_samples=3)
    assert len(refused.value.problems) == 4
    with pytest.raises(UserError, match="must satisfy 0 < 4 low <= high"):
        MacKayLoop(low=1.0, high=2.0)
    with pytest.raises(UserError, match="burn_in") as refused:
        Online(burn_in=-1, frequency=0, steps=0, lr=0.0, points=0, low=2.0, high=1.0)
    assert len(refused.value.problems) == 6


def test_the_rule_belongs_to_every_training_and_to_none_that_cannot_have_it(tmp_path: Path) -> None:
    """Planted bugs: a MAP cell under the rule that is shown for one without it; the evidence of noisy layers."""
    words = ["data=gap1d", "hyper=mackay_loop"]
    assert load_experiment([*words, "method=map"]).training_rule == MacKayLoop()
    assert load_experiment([*words, "method=map"]).uses_hyper
    assert not load_experiment(["data=gap1d", "hyper=evidence", "method=map"]).uses_hyper
    with pytest.raises(UserError, match="noise layers has none"):
        load_experiment([*words, "method=mc_dropout"])
    with pytest.raises(UserError, match="family=isotropic"):
        load_experiment([*words, "method=laplace_block", "hyper.family=layerwise"])
    torch.save({}, tmp_path / "mine.pt")
    with pytest.raises(UserError, match="gives a trained network"):
        load_experiment([*words, "method=map", f"model.weights={tmp_path / 'mine.pt'}"])
    keys = []
    for more in (["hyper=fixed"], ["hyper=evidence"], ["hyper=mackay_loop"], ["hyper=mackay_loop", "hyper.rounds=3"]):
        experiment = load_experiment(["data=gap1d", "method=laplace", f"output_dir={tmp_path}", *more])
        session = Session(CPU, 1, Console(), Console().progress(), StopRequest())
        keys.append(prepare(experiment, session).trainings[0].key)
    assert keys[0] == keys[1] and len(set(keys)) == 3


def test_the_cost_of_a_run_counts_the_updates(monkeypatch: pytest.MonkeyPatch) -> None:
    """By a clock that ticks once a look. Planted bug: an estimate of the steps alone, four times too short."""
    ticks = itertools.count()
    monkeypatch.setattr(cost_estimate.time, "perf_counter", lambda: float(next(ticks)))
    monkeypatch.setattr(LaneTrainer, "step_seconds", lambda group: 0.0)
    lanes = [Lane(classes(), 3)]
    for rule, updates in ((None, 0), (RULES[0], 3), (RULES[1], 3), (replace(RULES[1], burn_in=0, frequency=1), 6)):
        assert cost_estimate._training_seconds(classifier(rule), lanes, CPU) == updates
