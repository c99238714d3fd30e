"""The training engine: lanes, checkpoints, the cache and its leases. Each test names the bug that it catches."""

from __future__ import annotations

import itertools
import json
import math
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from bnn_runner.base import Model, Network
from bnn_runner.errors import Interrupted, UserError
from bnn_runner.models.likelihoods import Gaussian, NoiseRule
from bnn_runner.models.mlp import MLP
from bnn_runner.models.priors import Isotropic, Layerwise
from bnn_runner.rng import derive_seed
from bnn_runner.runtime import leases
from bnn_runner.runtime.leases import Lease
from bnn_runner.tasks import Task, TaskSpec
from bnn_runner.training.cache import NetworkCache
from bnn_runner.training.divergence import Diverged
from bnn_runner.training.engine import LaneTrainer
from bnn_runner.training.provider import NetworkProvider, Training
from bnn_runner.training.schedules import Schedule
from bnn_runner.training.state import Lane, TrainingConfig
from tests.problems import make_task

ROOT = Path(__file__).parents[2]
CPU = torch.device("cpu")
ADAM = Schedule("adam", epochs=4, batch_size=16, lr=0.02, warmup_epochs=1)
SGD = Schedule("sgd", epochs=4, batch_size=16, lr=0.02, momentum=0.9, nesterov=True)


class ConvNetwork(nn.Module):
    def __init__(self, num_outputs: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(1, 3, 3, padding=1)
        self.norm = nn.BatchNorm2d(3)
        self.out = nn.Linear(3 * 4, num_outputs)

    def forward(self, x: Tensor) -> Tensor:
        x = nn.functional.avg_pool2d(torch.tanh(self.norm(self.conv(x))), 3)
        return self.out(x.flatten(1))


@dataclass(frozen=True)
class Conv:
    """A convolution with batch normalisation for 6 × 6 images: no layer of its own takes stacked weights."""

    def problems(self, spec: TaskSpec) -> list[str]:
        return []

    def build(self, spec: TaskSpec) -> nn.Module:
        return ConvNetwork(spec.num_outputs)


def config(model: Model, schedule: Schedule = ADAM, **changes: Any) -> TrainingConfig:
    return TrainingConfig(
        model, schedule, **{"prior": Isotropic(2.0), "noise": NoiseRule(), "dtype": torch.float64} | changes
    )


def train(r: TrainingConfig, lanes: list[Lane], **arguments: Any) -> list[Network]:
    return LaneTrainer(r, lanes, CPU).train(arguments.pop("checkpoint", None), lambda *_: None, **arguments)


def numbers(network: Network) -> dict[str, Tensor]:
    found = dict(network.tensors)
    if isinstance(network.likelihood, Gaussian):
        found["log_noise"] = network.likelihood.log_noise
    return found


def assert_close(a: Network, b: Network, **tolerance: float) -> None:
    assert numbers(a).keys() == numbers(b).keys()
    for name, value in numbers(a).items():
        torch.testing.assert_close(value, numbers(b)[name], **tolerance, msg=lambda m, name=name: f"{name}: {m}")


def assert_equal(a: Network, b: Network) -> None:
    for name, value in numbers(a).items():
        assert torch.equal(value, numbers(b)[name]), name


# ---------------------------------------------------------------------------- a lane and itself

MODELS: dict[str, tuple[Model, tuple[int, ...], str]] = {
    "plain": (MLP(hidden=(6, 5)), (3,), "native"),
    "batchnorm": (MLP(hidden=(6, 6), activation="relu", norm="batch", residual=True), (3,), "native"),
    "layernorm": (MLP(hidden=(6, 5), activation="gelu", norm="layer"), (3,), "native"),
    "convolution": (Conv(), (1, 6, 6), "vmap"),
}


@pytest.mark.parametrize("kind", ["regression", "classification"])
@pytest.mark.parametrize("schedule", [ADAM, SGD], ids=["adam", "sgd"])
@pytest.mark.parametrize("name", MODELS)
def test_a_lane_among_others_is_the_lane_alone(name: str, schedule: Schedule, kind: str) -> None:
    """Planted bugs: a loss averaged over lanes; the norm of a gradient taken over all of them; one order of the
    points for all; a prior's gradient that is summed over lanes; lanes' data offsets forgotten."""
    model, shape, strategy = MODELS[name]
    shared, other = (make_task(kind, shape, 2, num_train=37, seed=s) for s in (0, 1))
    lanes = [Lane(shared, 11), Lane(shared, 12), Lane(other, 12), Lane(other, 13)]
    r = config(model, schedule, prior=Layerwise(1.5), stack="always")
    group = LaneTrainer(r, lanes, CPU)
    assert group.strategy == strategy
    together = group.train(None, lambda *_: None)
    for i in (1, 2, 3):
        alone = train(r, [lanes[i]])[0]
        assert_close(together[i], alone, rtol=1e-8, atol=1e-9)
        for a, b in zip(together[i].history, alone.history, strict=True):
            assert a["loss"] == pytest.approx(b["loss"], rel=1e-5) and a["nll"] == pytest.approx(b["nll"], rel=1e-8)
    distances = [
        float((numbers(a)["out.weight"] - numbers(b)["out.weight"]).norm()) for a, b in itertools.pairwise(together)
    ]
    assert min(distances) > 1e-3


def test_float32_lanes_begin_alike() -> None:
    """Planted bug: other initial weights, or another order, for stacked lanes than for a single one in float32."""
    task = make_task("regression", (3,), 1).to(CPU, torch.float32)
    short = replace(ADAM, epochs=1, batch_size=20, warmup_epochs=0)
    r = config(MLP(hidden=(6,)), short, dtype=torch.float32)
    lanes = [Lane(task, s) for s in (1, 2, 3)]
    for together, lane in zip(train(r, lanes), lanes, strict=True):
        assert_close(together, train(r, [lane])[0], rtol=1e-5, atol=1e-6)


def test_no_point_is_dropped_and_none_is_left_alone() -> None:
    """Planted bugs: drop_last; a last batch of one point under batchnorm (65 points, batch 64)."""
    task = make_task("regression", (3,), 1, num_train=65)
    for model in (MLP(hidden=(5,), norm="batch"), MLP(hidden=(5,))):
        still = Schedule("sgd", epochs=1, batch_size=64, lr=1e-12, shape="constant", momentum=0.0)
        group = LaneTrainer(config(model, still), [Lane(task, 0), Lane(task, 1)], CPU)
        sizes = [b - a for a, b in group.bounds]
        assert sum(sizes) == 65 and max(sizes) <= 64 and min(sizes) >= 2
        trained = group.train(None, lambda *_: None)
        if (
            model.norm == "none"
        ):  # nothing moves, so the epoch's mean loss is that of the initial network, every point once
            for network in trained:
                expected = -network.likelihood.log_prob(network(task.train.inputs), task.train.targets).mean()  # type: ignore[arg-type]
                assert network.history[0]["nll"] == pytest.approx(float(expected), rel=1e-6)
        else:
            assert all(int(n.buffers["norms.0.num_batches_tracked"]) == len(sizes) for n in trained)
    with pytest.raises(UserError, match="batch_size"):
        LaneTrainer(config(MLP(hidden=(5,), norm="batch"), replace(ADAM, batch_size=1)), [Lane(task, 0)], CPU)


# ------------------------------------------------------------------------- scalings of the objective


def ridge(task: Task, precision: float, noise: Tensor) -> Tensor:
    """argmin of Σ_n (y − Wx − b)²/2σ² + ½ precision |(W, b)|², [K, D + 1]."""
    x = torch.cat([task.train.inputs, torch.ones(len(task.train), 1, dtype=torch.float64)], 1)
    y = task.train.targets
    assert y is not None
    rows = []
    for k, sigma in enumerate(noise):
        gram = x.T @ x / sigma**2 + precision * torch.eye(x.shape[1], dtype=torch.float64)
        rows.append(torch.linalg.solve(gram, x.T @ y[:, k] / sigma**2))
    return torch.stack(rows)


def doubled(task: Task) -> Task:
    twice = torch.arange(len(task.train)).repeat(2)
    return replace(task, train=task.train.subset(twice), fingerprint=task.fingerprint + " twice")


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("optimizer", "batch_size", "tolerance"), [("sgd", 40, 1e-8), ("adam", 40, 1e-8), ("sgd", 10, 0.02)]
)
def test_map_of_a_linear_model_is_ridge_regression(optimizer: Any, batch_size: int, tolerance: float) -> None:
    """Planted bugs (PITFALLS C1): the prior divided by the batch size instead of N, doubled or halved; bias left out
    of the prior; σ in the wrong units. Doubled data at doubled precision is the same problem."""
    precision = 8.0
    task = make_task("regression", (3,), 2, num_train=40)
    noise = NoiseRule("fixed", sigma=1.2)  # in the targets' units: 1.2 / target_scale for the network
    lr = {"sgd": 0.05, "adam": 0.03}[optimizer]
    schedule = Schedule(optimizer, epochs=800 if batch_size == 40 else 150, batch_size=batch_size, lr=lr)
    expected = ridge(task, precision, 1.2 / task.target_scale)
    size = float(expected.norm())
    for data, p in ((task, precision), (doubled(task), 2 * precision)):
        whole = replace(schedule, batch_size=batch_size * len(data.train) // 40)
        network = train(config(MLP(hidden=()), whole, prior=Isotropic(p), noise=noise), [Lane(data, 1)])[0]
        found = torch.cat([network.parameters["out.weight"], network.parameters["out.bias"].unsqueeze(1)], 1)
        assert float((found - expected).norm()) < tolerance * size
    # The comparison can fail: half or double the precision is far away.
    for factor in (0.5, 2.0):
        assert float((ridge(task, factor * precision, 1.2 / task.target_scale) - expected).norm()) > 0.03 * size


def test_map_sits_at_a_zero_of_the_log_posterior() -> None:
    """Planted bug: noise that is learned from another objective than the weights are."""
    task = make_task("regression", (2,), 1, num_train=30)
    long = Schedule("adam", epochs=1000, batch_size=30, lr=0.02)
    network = train(config(MLP(hidden=(3,)), long, prior=Isotropic(3.0)), [Lane(task, 0)])[0]
    parameters = {n: p.clone().requires_grad_() for n, p in network.parameters.items()}
    assert isinstance(network.likelihood, Gaussian)
    log_noise = network.likelihood.log_noise.clone().requires_grad_()
    out = torch.func.functional_call(network.module, parameters, (task.train.inputs,))
    loss = -Gaussian(log_noise).log_prob(out, task.train.targets).sum()  # type: ignore[arg-type]
    loss = loss + 1.5 * sum((p.square().sum() for p in parameters.values()), torch.zeros(()))
    for grad in torch.autograd.grad(loss, [*parameters.values(), log_noise]):
        assert float(grad.abs().max()) < 1e-3
    assert network.history[-1]["loss"] * 30 == pytest.approx(float(loss.detach()), rel=1e-5)


def test_residual_noise_is_the_root_mean_square_residual() -> None:
    """Planted bug: the residual of the standardised targets in original units, or that of the initial network."""
    task = make_task("regression", (2,), 2, num_train=30)
    network = train(config(MLP(hidden=(4,)), noise=NoiseRule("residual")), [Lane(task, 0), Lane(task, 1)])[1]
    residual = (task.train.targets - network(task.train.inputs)).square().mean(0).sqrt()  # type: ignore[operator]
    torch.testing.assert_close(numbers(network)["log_noise"].exp(), residual)


# ------------------------------------------------------------------------------------ members


def test_member_seeds_do_not_meet() -> None:
    """Planted bug (PITFALLS C5): member seed = run seed + member, so that runs share members."""
    seeds = [derive_seed(run, "member", m) for run in range(40) for m in range(40)]
    assert len(set(seeds)) == len(seeds)
    streams = [derive_seed(s, name) for s in seeds[:200] for name in ("init", "order", "posterior", "eval")]
    assert len(set(streams)) == len(streams) and not set(streams) & set(seeds)


def _run(tmp_path: Path, *overrides: str) -> Path:
    from bnn_runner.experiment import load_experiment
    from bnn_runner.runner import run

    common = [
        "data=gap1d",
        "data.num_train=40",
        "model.hidden=[6]",
        "schedule.epochs=3",
        "figures=false",
        "metric=[marginal,joint]",
    ]
    outcome = run(load_experiment([*common, f"output_dir={tmp_path}", *overrides]))
    assert outcome.status == "done" and len(outcome.cells) == 1
    return outcome.cells[0]


def _keys(cell: Path) -> list[str]:
    keys: list[str] = json.loads((cell / "provenance.json").read_text())["training_keys"]
    return keys


def test_ensembles_are_made_of_distinct_members(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Planted bugs: one seed for all members; members shared by two runs; member 0 that is not the MAP network; an
    ensemble of one that scores otherwise than MAP."""
    first = _run(tmp_path, "method=ensemble", "method.size=3")
    second = _run(tmp_path, "method=ensemble", "method.size=3", "seed=1")
    keys = _keys(first) + _keys(second)
    assert len(set(keys)) == 6
    cache = NetworkCache(tmp_path / "cache")
    module = MLP(hidden=(6,)).build(TaskSpec("gap1d", "regression", (1,), 1, 0.1))
    members = [cache.load(k, module, CPU, torch.float32) for k in keys]
    weights = [torch.cat([p.flatten() for p in m.parameters.values()]) for m in members if m is not None]
    assert len(weights) == 6
    assert min(float((a - b).norm() / a.norm()) for i, a in enumerate(weights) for b in weights[:i]) > 0.1

    capsys.readouterr()
    point, single = _run(tmp_path, "method=map"), _run(tmp_path, "method=ensemble", "method.size=1")
    assert capsys.readouterr().out.count("nothing to train") == 2
    assert _keys(point) == _keys(single) == keys[:1]
    assert (point / "metrics.csv").read_bytes() == (single / "metrics.csv").read_bytes()
    from bnn_runner.evaluation.io import load

    assert torch.equal(load(point).test.loglik, load(single).test.loglik)  # type: ignore[arg-type]
    assert torch.equal(load(first).test.loglik[:1], load(point).test.loglik)  # type: ignore[index,arg-type]


# --------------------------------------------------------------------------------- checkpoints


def stop_after(steps: int) -> tuple[Callable[[str, int, int], None], Callable[[], bool]]:
    """A progress function and a stop() that is true once that many steps are done."""
    seen = {"steps": 0}

    def progress(stage: str, done: int, total: int) -> None:
        seen["steps"] = done

    return progress, lambda: seen["steps"] >= steps


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("schedule", [ADAM, SGD], ids=["adam", "sgd"])
@pytest.mark.parametrize(
    "steps", [1, 4, 6, 11, 12]
)  # 3 steps an epoch, 12 in all: in mid-epoch, at its end, at the very end
def test_a_resumed_training_is_bit_identical(
    tmp_path: Path, steps: int, schedule: Schedule, dtype: torch.dtype
) -> None:
    """Planted bugs: momentum, Adam's moments or its step count not saved; the order of the epoch drawn again; the
    running statistics, the noise or the epoch's loss so far forgotten; the warm-up begun again."""
    task = make_task("regression", (3,), 1, num_train=37).to(CPU, dtype)
    r = config(MLP(hidden=(6,), activation="relu", norm="batch"), schedule, dtype=dtype)
    lanes = [Lane(task, 1), Lane(task, 2)]
    straight = train(r, lanes)
    path = tmp_path / "partial" / "x.pt"
    progress, stop = stop_after(steps)
    with pytest.raises(Interrupted, match="epochs"):
        LaneTrainer(r, lanes, CPU).train(path, progress, stop)
    assert path.exists()
    seen: list[int] = []
    resumed = LaneTrainer(r, lanes, CPU).train(path, lambda stage, done, total: seen.append(done))
    assert seen == list(range(steps + 1, 13)), "it goes on from the checkpoint, not from the start"
    for a, b in zip(straight, resumed, strict=True):
        assert_equal(a, b)
        assert [{k: v for k, v in row.items() if k != "seconds"} for row in a.history] == [
            {k: v for k, v in row.items() if k != "seconds"} for row in b.history
        ]


def test_a_damaged_or_foreign_checkpoint_is_not_trusted(tmp_path: Path) -> None:
    """Planted bugs: a truncated checkpoint ends the run; one of another network is loaded as far as it goes."""
    task = make_task("regression", (3,), 1, num_train=20)
    r = config(MLP(hidden=(6,)))
    lanes, path = [Lane(task, 1)], tmp_path / "x.pt"
    straight = train(r, lanes)[0]
    progress, stop = stop_after(2)
    with pytest.raises(Interrupted):
        LaneTrainer(r, lanes, CPU).train(path, progress, stop)
    whole = path.read_bytes()
    for content in (whole[: len(whole) // 2], b"", b"nonsense"):
        path.write_bytes(content)
        assert_equal(train(r, lanes, checkpoint=path)[0], straight)
    with pytest.raises(Interrupted):
        LaneTrainer(config(MLP(hidden=(7,))), lanes, CPU).train(path, *stop_after(2))
    assert_equal(train(r, lanes, checkpoint=path)[0], straight)


# ------------------------------------------------------------------------------------- failure


def poisoned(task: Task) -> Task:
    """The same number of points, one of which makes the loss infinite."""
    y = task.train.targets
    assert y is not None
    bad = y.clone()
    bad[5] = math.inf
    return replace(task, train=replace(task.train, targets=bad), fingerprint=task.fingerprint + " poisoned")


def workplan(
    path: Path, r: TrainingConfig, say: Callable[[str], None] = lambda text: None, **changes: Any
) -> NetworkProvider:
    arguments: dict[str, Any] = {"progress": lambda *_: None, "stop": lambda: False} | changes
    return NetworkProvider(r, NetworkCache(path), CPU, say, **arguments)


def test_a_diverging_lane_is_named_and_the_others_survive(tmp_path: Path) -> None:
    """Planted bugs: NaN that spreads over lanes; a failure of one that throws all away; a network that diverged in
    the cache."""
    task = make_task("regression", (3,), 1, num_train=20)
    r = config(MLP(hidden=(6,)))
    lanes = [Lane(task, 1), Lane(poisoned(task), 2), Lane(task, 3)]
    with pytest.raises(Diverged, match=r"step [12] ") as caught:
        train(r, lanes)
    assert caught.value.lanes == (1,)
    trainings = [Training(lane.task, lane.seed, f"key{i}", f"lane {i}") for i, lane in enumerate(lanes)]
    plan = workplan(tmp_path, r)
    failed = plan.train_missing(trainings)
    assert list(failed) == ["key1"] and "schedule.lr" in failed["key1"]
    assert plan.load(trainings[1]) is None
    for i in (0, 2):
        network = plan.load(trainings[i])
        assert network is not None
        assert_close(network, train(r, [lanes[i]])[0], rtol=1e-9, atol=1e-9)
    assert list(tmp_path.glob("partial/*")) == [] and list(tmp_path.rglob("*.lease")) == []


def test_whether_to_stack_is_decided_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Planted bug: a second probe, as on a GPU, that finds the loop faster after stacking was announced."""
    answers = iter(["vmap"])

    def undecided(module: nn.Module, num_lanes: int, device: torch.device, setting: str, probe: Any = None) -> str:
        return "vmap" if setting == "always" else next(answers, "loop")

    monkeypatch.setattr("bnn_runner.training.engine.choose_strategy", undecided)
    task = make_task("regression", (1, 6, 6), 1, num_train=12)
    plan = workplan(tmp_path, config(Conv(), replace(ADAM, epochs=1, warmup_epochs=0)))
    assert plan.train_missing([Training(task, s, f"key{s}", "") for s in (1, 2)]) == {}


@pytest.mark.parametrize(
    "schedule", [replace(ADAM, lr=1e30), replace(SGD, lr=1e30, nesterov=False)], ids=["adam", "sgd"]
)
def test_the_first_loss_that_is_not_finite_ends_training(schedule: Schedule) -> None:
    """Planted bug (PITFALLS A14): NaN that trains to the end."""
    task = make_task("regression", (3,), 1, num_train=20)
    steps: list[int] = []
    with pytest.raises(Diverged, match="step"):
        LaneTrainer(config(MLP(hidden=(6,)), replace(schedule, warmup_epochs=0)), [Lane(task, 1)], CPU).train(
            None, lambda s, d, t: steps.append(d)
        )
    assert len(steps) < 5


def test_weights_that_overflow_in_the_last_step_are_noticed() -> None:
    """Planted bug: the loss of the last step is finite, the weights after it are not, and nobody looks."""
    task = make_task("regression", (3,), 1, num_train=20)
    one_step = Schedule("sgd", epochs=1, batch_size=20, lr=1e308, shape="constant", momentum=0.0)
    big = replace(task.train, targets=1e3 * task.train.targets)  # type: ignore[operator]
    noise = NoiseRule("fixed", sigma=0.01)
    with pytest.raises(Diverged):
        train(config(MLP(hidden=(6,)), one_step, noise=noise), [Lane(replace(task, train=big), 1)])


# --------------------------------------------------------------------------------------- cache


def _flip(content: bytes) -> bytes:
    return content[:-9] + bytes([content[-9] ^ 1]) + content[-8:]


@pytest.mark.parametrize(
    "damage",
    [lambda c: c[: len(c) // 2], lambda c: b"", lambda c: b"\0" * len(c), _flip, lambda c: c + b"more"],
    ids=["cut", "empty", "zeros", "one bit", "longer"],
)
def test_a_damaged_cache_entry_is_rebuilt(tmp_path: Path, damage: Callable[[bytes], bytes]) -> None:
    """Planted bug: an entry that is trusted because it is there (a digest that is not compared)."""
    task = make_task("classification", (3,), 2, num_train=20)
    r = config(MLP(hidden=(4,), norm="batch"))
    training = Training(task, 5, "key", "only")
    said: list[str] = []
    plan = workplan(tmp_path, r, said.append)
    assert plan.train_missing([training]) == {}
    path = plan.cache.path("key")
    whole, first = path.read_bytes(), plan.load(training)
    assert first is not None and first.key == "key" and len(first.history) == ADAM.epochs
    assert plan.train_missing([training, training]) == {} and "nothing to train" in said[-1]
    path.write_bytes(damage(whole))
    assert plan.load(training) is None
    path.write_bytes(damage(whole))
    assert plan.train_missing([training]) == {}
    again = plan.load(training)
    assert again is not None
    assert_equal(first, again)
    assert numbers(first).keys() == numbers(again).keys() and first.prior_precision == again.prior_precision


def test_an_entry_of_another_shape_is_not_loaded(tmp_path: Path) -> None:
    """Planted bug: shapes that are not compared, so that a changed model gives a strange network."""
    task = make_task("classification", (3,), 2, num_train=20)
    training = Training(task, 5, "key", "only")
    workplan(tmp_path, config(MLP(hidden=(4,)))).train_missing([training])
    wider = workplan(tmp_path, config(MLP(hidden=(5,))))
    assert wider.load(training) is None
    assert wider.train_missing([training]) == {}
    network = wider.load(training)
    assert network is not None and network.parameters["out.weight"].shape == (2, 5)


# --------------------------------------------------------------------------------------- lease


def _dead_pid() -> int:
    child = subprocess.Popen([sys.executable, "-c", ""])
    child.wait()
    return child.pid


def _lease_file(path: Path, **changes: Any) -> Path:
    import socket

    body = {"token": "other", "pid": _dead_pid(), "host": socket.gethostname(), "started": "1"} | changes
    file = path.with_name(path.name + ".lease")
    file.write_text(json.dumps(body))
    return file


@pytest.mark.parametrize("case", ["gone", "reused", "damaged", "silent host"])
def test_the_lease_of_a_dead_owner_is_taken_over(tmp_path: Path, case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Planted bugs: a killed job's lease that blocks for ever; a process id that another process has by now."""
    monkeypatch.setattr(leases, "DEAD_AFTER_SECONDS", 0.2)
    path, told = tmp_path / "entry", []
    if case == "gone":
        file = _lease_file(path)
    elif case == "reused":
        file = _lease_file(path, pid=os.getpid(), started="1")
    elif case == "damaged":
        file = _lease_file(path)
        file.write_text("{")
    else:
        file = _lease_file(path, host="elsewhere", pid=os.getpid())
    with Lease(path, told.append, poll_seconds=0.05) as mine:
        assert json.loads(file.read_text())["token"] == mine.token
    assert not file.exists() and len(told) == (case == "silent host")
    assert [p.name for p in tmp_path.iterdir()] == [], "no draft and no grave is left behind"


def test_a_living_owner_is_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Planted bugs: a lease that two hold at once; a heartbeat that is not looked at; a stop that is not heard."""
    monkeypatch.setattr(leases, "DEAD_AFTER_SECONDS", 0.4)
    monkeypatch.setattr(leases, "HEARTBEAT_SECONDS", 0.05)
    path, told, events = tmp_path / "entry", [], []
    holding, release = threading.Event(), threading.Event()

    def owner() -> None:
        with Lease(path) as lease:
            # Seen from another machine: only the heartbeat says that it lives.
            file = lease.file
            file.write_text(json.dumps({**json.loads(file.read_text()), "host": "elsewhere"}))
            holding.set()
            release.wait(20)
            events.append("released")

    thread = threading.Thread(target=owner)
    thread.start()
    assert holding.wait(20)
    begun = time.monotonic()
    with (
        pytest.raises(InterruptedError),
        Lease(path, told.append, lambda: time.monotonic() > begun + 1.0, poll_seconds=0.02),
    ):
        events.append("entered too early")
    assert len(told) == 1 and "elsewhere" in told[0]
    threading.Timer(0.2, release.set).start()
    with Lease(path, told.append, poll_seconds=0.02):
        events.append("entered")
    thread.join()
    assert events == ["released", "entered"]


RACE = """
import sys, time, torch
from pathlib import Path
from tests.problems import make_task
from tests.training.test_lanes import MLP, Lane, Schedule, Training, config, workplan
folder, me = Path(sys.argv[1]), sys.argv[2]
torch.set_num_threads(1)
task = make_task("regression", (3,), 1, num_train=20)
log = folder / "log"
def progress(stage, done, total):
    if done == 1:
        with log.open("a") as f:
            f.write(me + "\\n")
    time.sleep(0.005)
trainings = [Training(task, s, f"key{s}", "") for s in (1, 2)]
if me == "b":
    trainings.reverse()
plan = workplan(folder, config(MLP(hidden=(6,)), Schedule(epochs=60, batch_size=20)), print, progress=progress)
(folder / ("ready-" + me)).touch()
while not all((folder / ("ready-" + n)).exists() for n in "ab"):
    time.sleep(0.01)
assert plan.train_missing(trainings) == {}
assert all(plan.load(t) is not None for t in trainings)
"""


@pytest.mark.exhaustive
def test_two_processes_train_once(tmp_path: Path) -> None:
    """Planted bugs: no second look at the cache after the lease is got; leases taken in the order of the command, so
    that two jobs wait for each other."""
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    racers = [
        subprocess.Popen(
            [sys.executable, "-c", RACE, str(tmp_path), me],
            env=environment,
            cwd=ROOT,
            stdout=subprocess.PIPE,
            text=True,
        )
        for me in "ab"
    ]
    said = [racer.communicate(timeout=120)[0] for racer in racers]
    assert [racer.returncode for racer in racers] == [0, 0]
    assert len((tmp_path / "log").read_text().split()) == 1
    assert sum("waiting" in text for text in said) == 1
    assert list(tmp_path.rglob("*lease*")) == []
