"""Networks that use layers, weights and constants in unusual ways (`tests.zoo`): right, or refused by name."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call

import bnn_runner
from bnn_runner.base import Network
from bnn_runner.curvature.jacobians import Jacobians
from bnn_runner.errors import RunFailed
from bnn_runner.methods.bbb import BBB
from bnn_runner.methods.laplace import Laplace
from bnn_runner.runtime.torch_state import evaluation_mode
from bnn_runner.tasks import Task, TaskSpec
from bnn_runner.training.schedules import Schedule
from tests.problems import context, make_network, make_task
from tests.zoo import IMAGES, ZOO

REFUSED = {"always dropout", "spoiled inputs", "no backward", "plain list"}
pytestmark = pytest.mark.filterwarnings("ignore:.*weight_norm:FutureWarning")


@dataclass(frozen=True)
class Made:
    """A model of a fixed class."""

    module: Callable[[], nn.Module]

    def problems(self, spec: TaskSpec) -> list[str]:
        return []

    def build(self, spec: TaskSpec) -> nn.Module:
        """In double precision, constants too."""
        before = torch.get_default_dtype()
        torch.set_default_dtype(torch.float64)
        try:
            return self.module()
        finally:
            torch.set_default_dtype(before)


def problem(name: str, num_train: int = 12) -> tuple[Task, Network]:
    task = make_task("regression", (1, 5, 6) if name in IMAGES else (3,), 2, num_train=num_train)
    return task, make_network(Made(ZOO[name]), task)


def derivatives(network: Network, x: Tensor) -> dict[str, Tensor]:
    """Jacobians [B, K, P_t] of every tensor, one point and one output after the other."""
    rows: dict[str, list[Tensor]] = {n: [] for n in network.parameters}
    tensors = {n: t.detach().clone().requires_grad_() for n, t in network.parameters.items()}
    with evaluation_mode(network.module):
        for point in x.split(1):
            outputs = functional_call(network.module, tensors | network.buffers, (point.clone(),))[0]
            for output in outputs:
                found = torch.autograd.grad(output, list(tensors.values()), retain_graph=True, materialize_grads=True)
                for n, g in zip(tensors, found, strict=True):
                    rows[n].append(g.flatten())
    return {n: torch.stack(r).view(len(x), len(r) // len(x), -1) for n, r in rows.items()}


@pytest.mark.parametrize("name", sorted(ZOO.keys() - REFUSED))
def test_jacobians_are_those_of_each_point(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Planted bugs: reads behind a closed gate not counted; a scalar's Jacobian without its axis; recurrent layers."""
    monkeypatch.setattr(torch, "linspace", _double(torch.linspace))
    task, network = problem(name)
    few, x = task.train.inputs[:2], task.train.inputs
    if "gate" in name or "open" in name:  # closed at the points of the check
        few = few.clone()
        few[:, 0] = 0.1
        x = torch.cat([few, 3 * x])
    jacobians = Jacobians(network)
    jacobians(few)
    found = jacobians(x)
    for n, expected in derivatives(network, x).items():
        torch.testing.assert_close(found.tensors[n].dense(), expected, rtol=1e-8, atol=1e-10)


def _double(make: Callable[..., Tensor]) -> Callable[..., Tensor]:
    return lambda *a, **k: make(*a, **{"dtype": torch.float64, **k})


NOISY = {
    "tied module": {"into", "out"},
    "tied weight": {"out"},
    "borrowed weight": {"out"},
    "closed gate": {"out"},
    "doubled": {"out"},
    "weight norm": {"out"},
    "by keyword": {"a", "out"},
}
"""Layers whose outputs may have the noise of their weights: those whose weight nothing else reads."""


@pytest.mark.parametrize("estimator", ["local", pytest.param("flipout", marks=pytest.mark.exhaustive)])
@pytest.mark.parametrize("name", NOISY)
def test_bbb_estimates_the_same_expectation_by_every_estimator(name: str, estimator: str) -> None:
    """Planted bugs: noise in one of a weight's two uses; under a gate that is closed at the first points."""
    task, network = problem(name, num_train=24)
    network = replace(network, parameters={n: p.clone() for n, p in network.parameters.items()})
    schedule = Schedule(optimizer="adam", epochs=1, batch_size=24, lr=0.01)
    x, y = 1.5 * task.train.inputs, task.train.targets
    assert y is not None

    def losses(kind: str, count: int = 200) -> Tensor:
        fit = BBB(estimator=kind, rho_init=0.0).begin(task, network, schedule, 0)  # type: ignore[arg-type]
        assert {n.rpartition(".")[0] for n in fit.hooked} == (set() if kind == "weights" else NOISY[name])
        stream = torch.Generator().manual_seed(1)
        return torch.stack([fit.gradients(x, y, fit.sigmas(), stream)[0] for _ in range(count)])

    ours, weights = losses(estimator), losses("weights", 600)
    error = (ours.var() / len(ours) + weights.var() / len(weights)).sqrt()
    assert float((ours.mean() - weights.mean()).abs() / error) < 4


def test_a_second_call_that_the_probe_did_not_see_is_refused() -> None:
    """Planted bug: other noise in the second call of a layer."""

    class Twice(nn.Module):
        again = False

        def __init__(self) -> None:
            super().__init__()
            self.a, self.out = nn.Linear(3, 3), nn.Linear(3, 2)

        def forward(self, x: Tensor) -> Tensor:
            h = torch.tanh(self.a(x))
            return self.out(torch.tanh(self.a(h)) if self.again else h)

    task = make_task("regression", (3,), 2, num_train=12)
    network = make_network(Made(Twice), task)
    fit = BBB().begin(task, network, Schedule(optimizer="adam", epochs=1, batch_size=12, lr=0.01), 0)
    fit.update()
    Twice.again = True
    with pytest.raises(RunFailed, match=r"Layer a must be called once per forward pass.*Use method=bbb_weights"):
        fit.update()


@pytest.mark.parametrize("structure", ["kfac", "full"])
def test_a_saved_laplace_keeps_its_rules(structure: str) -> None:
    """Planted bug: the check made again at other points, where a gate is open, and other rules than the curvature's."""
    task, network = problem("closed gate")
    posterior = Laplace(structure=structure).fit(task, [network], context())  # type: ignore[arg-type]
    again = Jacobians.from_state(posterior.jacobians.state())
    far = 5 * task.test.inputs
    assert again(far).dense().allclose(posterior.jacobians(far).dense())
    assert {n: again.rule(n) for n in network.parameters} == {
        n: posterior.jacobians.rule(n) for n in network.parameters
    }


@pytest.mark.parametrize("method", ["bbb", "swag"])
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_a_posterior_is_fitted_again_without_gradients_on(
    mode: Callable[[], AbstractContextManager[None]], method: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Planted bug: RuntimeError (element 0 of tensors does not require grad) from `draws()` in torch.no_grad()."""
    monkeypatch.chdir(tmp_path)
    words = ["data=gap1d", f"method={method}", "debug=fast", "metric=[marginal]", "figures=false"]
    run = bnn_runner.run(words, quiet=True)
    x = torch.linspace(-1, 1, 3)[:, None]
    with mode():
        there = run.draws(2)(x)
    torch.testing.assert_close(there, bnn_runner.load(run.folder, quiet=True).draws(2)(x))
