"""Parts of the training engine: optimisers against torch's own, compilation that fails, devices, progress in a file."""

from __future__ import annotations

import io
import itertools
from typing import Any

import pytest
import torch
from scipy.optimize import minimize
from torch import Tensor

from bnn_runner.errors import UserError
from bnn_runner.hyper.bfgs import maximise
from bnn_runner.models.mlp import MLP
from bnn_runner.models.resnet20 import ResNet20
from bnn_runner.rng import generator
from bnn_runner.runtime import console as progresses
from bnn_runner.runtime.console import Console
from bnn_runner.runtime.devices import pick_device
from bnn_runner.training.engine import LaneTrainer, _laid_out
from bnn_runner.training.optimizers import SGD, Adam
from bnn_runner.training.provider import Training
from bnn_runner.training.schedules import Schedule
from bnn_runner.training.state import Lane
from tests.problems import make_task
from tests.training.test_lanes import CPU, assert_equal, config, train, workplan

DECAYS = (0.3, 0.0, 0.3, 0.05)


def tensors() -> list[Tensor]:
    g = generator(0, "test optimisers")
    shapes = ((3, 4), (5,), (2, 3, 2, 2), ())
    return [torch.randn(s, generator=g, dtype=torch.float64) for s in shapes]


def gradients(values: list[Tensor], step: int) -> list[Tensor]:
    """Of a function that is no quadratic, and of unequal scale in every tensor."""
    return [10.0 ** (1 - i) * (v.tanh() + torch.sin(v + step)) for i, v in enumerate(values)]


@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("kind", ["adam", "plain", "momentum", "nesterov"])
def test_updates_are_those_of_torch(kind: str, fused: bool) -> None:
    """Planted bugs: the decay of one tensor on another; state of the tensors of one decay mixed with the next's;
    momentum that starts at zero times (1 − μ); a learning rate that is not the step's."""
    ours, theirs = tensors(), [torch.nn.Parameter(t) for t in tensors()]
    groups = [{"params": [p], "weight_decay": d} for p, d in zip(theirs, DECAYS, strict=True)]
    if kind == "adam":
        mine: Any = Adam(ours, DECAYS, fused)
        reference: torch.optim.Optimizer = torch.optim.Adam(groups, lr=1.0, foreach=False, fused=False)
    else:
        momentum = 0.0 if kind == "plain" else 0.8
        mine = SGD(ours, DECAYS, fused, momentum, kind == "nesterov")
        reference = torch.optim.SGD(groups, lr=1.0, momentum=momentum, nesterov=kind == "nesterov", foreach=False)
    for step in range(12):
        lr = 0.05 / (1 + step)
        mine.step(ours, gradients(ours, step), lr)
        for group, p, grad in zip(
            reference.param_groups, theirs, gradients([p.detach() for p in theirs], step), strict=True
        ):
            group["lr"], p.grad = lr, grad
        reference.step()
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b.detach(), rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("fused", [True, False])
def test_gradients_of_another_layout_are_not_scrambled(fused: bool) -> None:
    """Planted bug: a channels-last weight updated by a contiguous gradient, number by number as they lie."""
    plain = torch.randn(4, 3, 2, 2, generator=generator(0, "test layout"), dtype=torch.float64)
    grad = plain.sin()
    last = plain.clone(memory_format=torch.channels_last)
    for weight in (plain, last):
        Adam([weight], [0.1], fused).step([weight], [_laid_out(grad, weight)], 0.05)
    assert last.stride() != plain.stride()
    torch.testing.assert_close(last, plain, rtol=1e-12, atol=1e-12)


def test_a_single_network_for_images_lies_channels_last() -> None:
    """Planted bug: weights that are not the module's own, or a trained network that keeps the training's layout."""
    task = make_task("classification", (3, 8, 8), 2, num_train=12)
    group = LaneTrainer(config(ResNet20(), Schedule("sgd", epochs=1, batch_size=6, lr=0.01)), [Lane(task, 1)], CPU)
    stem = group.state.parameters["stem.weight"]
    assert stem.shape == (1, 16, 3, 3, 3) and stem[0].is_contiguous(memory_format=torch.channels_last)
    assert stem.data_ptr() == group.module.stem.weight.data_ptr()  # type: ignore[union-attr,operator]
    [network] = group.train(None, lambda *_: None)
    assert all(p.is_contiguous() for p in network.parameters.values())
    assert int(network.buffers["stem_norm.num_batches_tracked"]) == 2
    torch.testing.assert_close(network.parameters["stem.weight"], stem[0], rtol=0, atol=0)


def test_a_compilation_that_fails_is_told_and_changes_nothing(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Planted bugs: a failure that ends the run, or is silent; the trial that moves running statistics."""
    task = make_task("regression", (3,), 1, num_train=20)
    plain = config(MLP(hidden=(4,), norm="batch"))
    expected = train(plain, [Lane(task, 5)])[0]

    def broken(module: torch.nn.Module) -> Any:
        def call(x: Tensor) -> Tensor:
            module(x)
            raise RuntimeError("no C++ compiler")

        return call

    for index, (compiler, told) in enumerate([(broken, ["no C++ compiler"]), (lambda module: module, [])]):
        monkeypatch.setattr(torch, "compile", compiler)
        said: list[str] = []
        plan = workplan(tmp_path / str(index), config(plain.model, compile=True), said.append)
        training = Training(task, 5, "key", "only")
        assert plan.train_missing([training]) == {}
        network = plan.load(training)
        assert network is not None
        assert_equal(network, expected)
        notes = [line for line in said if "compile=true is not used" in line]
        assert len(notes) == len(told) and all(t in n for t, n in zip(told, notes, strict=True))


@pytest.mark.parametrize(
    ("values", "told"),
    [
        ({"epochs": -3}, ["schedule.epochs must be at least 1; got -3"]),
        ({"epochs": 0, "warmup_epochs": -1}, ["got 0", "schedule.warmup_epochs must be"]),
        ({"epochs": 3, "warmup_epochs": 5}, ["must be between 0 and schedule.epochs=3; got 5"]),
        ({"epochs": 3, "warmup_epochs": float("nan")}, ["got nan"]),
    ],
)
def test_a_schedule_that_cannot_be_is_told_once(values: dict[str, float], told: list[str]) -> None:
    """Planted bugs: a second mistake made of the first; no number taken for a warm-up."""
    with pytest.raises(UserError) as caught:
        Schedule(**values)  # type: ignore[arg-type]
    assert len(caught.value.problems) == len(told)
    assert all(words in problem for words, problem in zip(told, caught.value.problems, strict=True))
    assert Schedule(epochs=3, warmup_epochs=3).warmup_epochs == 3


def test_auto_follows_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """Planted bugs: BNN_DEVICE over a device that was asked for; a misspelt one taken for the CPU."""
    monkeypatch.setenv("BNN_DEVICE", "cpu")
    assert pick_device("auto") == CPU
    monkeypatch.setenv("BNN_DEVICE", "gpu")
    assert pick_device("cpu") == CPU
    with pytest.raises(UserError, match="got gpu"):
        pick_device("auto")
    monkeypatch.setenv("BNN_DEVICE", "")
    assert pick_device("auto").type in ("cpu", "cuda", "mps")


def test_progress_in_a_file_is_sparse_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    """Planted bugs (PITFALLS H6): a carriage return a step; silence for hours; a time left that is the time gone."""
    clock = itertools.count(0.0, 1.0)
    monkeypatch.setattr(progresses.time, "monotonic", lambda: next(clock))
    stream = io.StringIO()
    progress = Console(stream).progress()
    for step in range(1, 201):
        progress("training", step, 200)
    lines = stream.getvalue().splitlines()
    assert "\r" not in stream.getvalue()
    assert lines[0] == "training: this will take about 3 min (199 steps at 1000 ms)"
    told = [line for line in lines if " of 200" in line]
    assert lines[1:] == told and len(told) == 6, "one each 31 seconds of 200"
    assert told[0] == "training: 32 of 200 (16 %), 1 steps/s, 3 min left"
    assert told[-1].endswith("13 s left")
    quick = io.StringIO()
    progress = Console(quick).progress()
    for step in range(1, 3):
        progress("posterior", step, 2)
    assert quick.getvalue() == ""


@pytest.mark.parametrize("fixed", [None, 1])
@pytest.mark.parametrize("bounds", [(-20.0, 20.0), (-0.5, 1.0)])
def test_the_ascent_ends_where_scipy_ends(bounds: tuple[float, float], fixed: int | None) -> None:
    """Planted bugs: a fixed variable that moves; a bound passed or kept after the gradient leaves it; an early stop."""
    curvature = torch.tensor([[4.0, 1.2, 0.3], [1.2, 1.0, -0.2], [0.3, -0.2, 30.0]], dtype=torch.float64)
    centre = torch.tensor([1.5, -2.0, 0.4], dtype=torch.float64)

    def objective(x: Tensor) -> Tensor:
        d = x - centre
        return -0.5 * d @ curvature @ d - 0.1 * (x.exp() + d**4).sum()

    start = torch.tensor([0.5, 0.25, -0.25], dtype=torch.float64)
    free = torch.tensor([i != fixed for i in range(3)])
    found = maximise(objective, start, free, *bounds, 100)

    def negative(x: Any) -> tuple[float, Any]:
        point = torch.tensor(x).requires_grad_()
        value = -objective(point)
        (grad,) = torch.autograd.grad(value, point)
        return float(value.detach()), grad.numpy()

    limits = [bounds if i != fixed else (float(start[i]), float(start[i])) for i in range(3)]
    reference = minimize(
        negative, start.numpy(), jac=True, bounds=limits, method="L-BFGS-B", options={"ftol": 1e-15, "gtol": 1e-10}
    )
    torch.testing.assert_close(found.point, torch.tensor(reference.x), rtol=1e-5, atol=1e-5)
    assert found.finite and found.gradient < 1e-4 and 3 < found.iterations < 60
    if fixed is not None:
        assert found.point[fixed] == start[fixed]
    assert bool((found.point >= bounds[0]).all()) and bool((found.point <= bounds[1]).all())


def test_the_ascent_backs_out_of_a_region_without_values() -> None:
    """Planted bugs: a step into NaN that is taken; a start in NaN that is reported as a maximum."""

    def objective(x: Tensor) -> Tensor:
        return -((x - 1.9) ** 2).sum() + 0.1 * (2 - x).log().sum()  # NaN above 2

    start, free = torch.zeros(2, dtype=torch.float64), torch.tensor([True, True])
    found = maximise(objective, start, free, -5.0, 5.0, 100)
    exact = (3.9 - (0.1**2 + 0.2) ** 0.5) / 2  # where 2 (1.9 - x) (2 - x) = 0.1
    torch.testing.assert_close(found.point, torch.full_like(start, exact), rtol=0, atol=1e-5)
    lost = maximise(objective, torch.full_like(start, 3.0), free, -5.0, 5.0, 100)
    assert not lost.finite and torch.equal(lost.point, torch.full_like(start, 3.0))
