"""Networks and data at the edges: right, or refused before the work with a reason (own classes, whole path)."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from bnn_runner.cli.main import run
from bnn_runner.curvature.jacobians import Jacobians
from bnn_runner.errors import UserError
from bnn_runner.experiment import load_experiment
from bnn_runner.hyper.fixed import Fixed
from bnn_runner.methods.laplace import Laplace
from bnn_runner.models.mlp import MLP
from tests.problems import context, make_network, make_task

SMALL = ["data=two_moons", "data.num_train=41", "data.num_test=40", "eval.num_draws=20", "metric=[marginal]"]
SHORT = ["figures=false", "schedule.epochs=2", "allow=[tests]"]


def own(name: str, *arguments: str) -> list[str]:
    return [f"model._target_=tests.user_networks.{name}", *arguments]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (own("Frozen"), "got body.weight, body.bias. Make them buffers"),
        (own("Double", "model.casts=true"), "must have the same dtype"),
        (own("Rows", "model.inputs=2", "model.outputs=1"), "a single logit z of the second class"),
        (["data=gap1d", *own("Flat")], "must return [2, 1] for two points"),
    ],
    ids=["frozen", "double inputs", "one logit", "squeezed"],
)
def test_invalid_networks_are_refused_before_the_work(words: list[str], message: str) -> None:
    """Planted bugs: frozen weights trained and given a posterior; outputs [B] broadcast against targets [B, 1]."""
    base = SMALL if not any(w.startswith("data=") for w in words) else []
    with pytest.raises(UserError, match=re.escape(message)):
        load_experiment([*base, *SHORT, *words, "method=laplace_kfac"])


@pytest.mark.parametrize(
    ("words", "weights"),
    [(own("Shared"), 4 + 2 + 2 + 6 + 3), (own("FixedBody"), 10), (own("Double"), 6), (own("Normed"), 37)],
    ids=["tied and unused", "fixed body", "double", "batchnorm"],
)
def test_what_is_right_runs(words: list[str], weights: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A tied weight counts once, an unused one keeps its prior, buffers stay. 37 points in batches of 12 leave a
    batch of one to a naive cut. Planted bugs: a gradient that is None; a last batch of one under batchnorm."""
    monkeypatch.chdir(tmp_path)
    assert run([*SMALL, *SHORT, *words, "method=laplace_full", "schedule.batch_size=12", "hyper=fixed"]) == 0
    [cell] = tmp_path.glob("outputs/runs/two_moons/module/laplace_full/*/cell.json")
    assert json.loads(cell.read_text())["report"]["weights_in_basis"] == weights


@pytest.mark.parametrize("structure", ["full", "block", "kfac", "ekfac", "diag"])
@pytest.mark.parametrize("kind", ["regression", "classification"])
def test_a_last_batch_of_one_changes_nothing(structure: Any, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Planted bugs: a squeeze that takes the axis of a single point; a point dropped; means weighted by batches."""
    task = make_task(kind, (3,), 1 if kind == "regression" else 2, num_train=15)
    network = make_network(MLP(hidden=(4,), norm="batch"), task)
    method = Laplace(structure=structure, mode="tangent")
    whole = method.fit(task, [network], context(Fixed()))
    monkeypatch.setattr(Jacobians, "batch_size", lambda *_, **__: 7)
    parts = method.fit(task, [network], context(Fixed()))
    assert parts.report.facts["evidence_nats"] == pytest.approx(whole.report.facts["evidence_nats"], rel=1e-8)
    x = task.test.inputs
    one = torch.cat([parts.moments(x[:7]).covariance, parts.moments(x[7:8]).covariance])
    torch.testing.assert_close(one, whole.moments(x[:8]).covariance, rtol=1e-8, atol=1e-10)
    draws = parts.draws(3, 0)
    torch.testing.assert_close(torch.cat([draws(x[:7]), draws(x[7:8])], 1), draws(x[:8]), rtol=1e-9, atol=1e-10)


def test_double_networks_keep_their_precision() -> None:
    """Planted bug: a factor or a draw that goes through single precision."""
    task = make_task("classification", (3,), 3, num_train=20)
    network = make_network(MLP(hidden=(4,)), task)
    single = replace(network, parameters={n: p.float() for n, p in network.parameters.items()})
    for structure in ("full", "kfac", "diag"):
        posterior = Laplace(structure=structure).fit(task, [network], context(Fixed()))  # type: ignore[arg-type]
        assert posterior.draws(2, 0)(task.test.inputs).dtype == torch.float64
        tiny = replace(task, train=replace(task.train, inputs=task.train.inputs.float()))
        rough = Laplace(structure=structure).fit(tiny, [single], context(Fixed()))  # type: ignore[arg-type]
        gap = abs(rough.report.facts["evidence_nats"] - posterior.report.facts["evidence_nats"])
        assert 0 < gap < 1e-3 * abs(posterior.report.facts["evidence_nats"])
