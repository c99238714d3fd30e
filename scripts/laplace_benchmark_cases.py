"""The cases that `benchmark_laplace.py` times: the same computation here and in laplace-torch, on the same network.

Each function prepares one side of a case and returns the computation, which alone is timed. A side is "ours", the name
of a backend of laplace-torch, or a bound. Numbers are float32, the default of both programs; our sums and
factorisations are float64 internally.
"""

from __future__ import annotations

import io
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from laplace_benchmark_bounds import BOUNDS
from torch import Tensor, nn

from bnn_runner.base import FitReport, Network
from bnn_runner.curvature.base import Curvature
from bnn_runner.curvature.block_curvature import BlockCurvature
from bnn_runner.curvature.full import FullCurvature, fit_full
from bnn_runner.curvature.jacobians import CHECKED_POINTS, Jacobians
from bnn_runner.curvature.output_curvature import OutputCurvature
from bnn_runner.curvature.parameter_subset import last_layer_names
from bnn_runner.curvature.psd import Repairs
from bnn_runner.curvature.structures import Structure, fit_structure
from bnn_runner.curvature.training_passes import TrainingPasses
from bnn_runner.evaluation.closed_form import probit_log_probs, variances
from bnn_runner.laplace.evidence import log_evidence, log_likelihood
from bnn_runner.laplace.posterior import LinearisedLaplace
from bnn_runner.models.likelihoods import Categorical, Gaussian, NoiseRule
from bnn_runner.models.mlp import MLP
from bnn_runner.models.priors import Isotropic
from bnn_runner.runtime.console import Console
from bnn_runner.runtime.signals import stop_on_signals
from bnn_runner.runtime.torch_state import true_float32
from bnn_runner.tasks import Split, Task, TaskSpec
from bnn_runner.training.engine import LaneTrainer
from bnn_runner.training.schedules import Schedule
from bnn_runner.training.state import Lane, TrainingConfig

Run = Callable[[], object]
PEERS = {"default": "CurvlinopsGGN", "asdl": "AsdlGGN", "backpack": "BackPackGGN"}
"""Backends of laplace-torch by the name of their package; curvlinops is its default."""

PRECISION = 1.0
STEPS, PEER_STEPS = 100, 10
LANES, EPOCHS = 20, 20


@dataclass(frozen=True)
class Problem:
    """A network as a plain module, and data: `x`, `y` to fit on, `test` to predict."""

    module: nn.Module
    x: Tensor
    y: Tensor
    test: Tensor
    kind: str

    def loader(self, batch_size: int) -> Any:
        from torch.utils.data import DataLoader, TensorDataset

        return DataLoader(TensorDataset(self.x, self.y), batch_size=batch_size)

    def task(self) -> Task:
        train = Split(self.x, self.y, torch.arange(len(self.x)))
        none = train.subset(torch.arange(0))
        outputs = 1 if self.kind == "regression" else 10
        spec = TaskSpec("random", self.kind, tuple(self.x.shape[1:]), outputs, 0.0)  # type: ignore[arg-type]
        return Task(spec, train, none, none, {}, "random", torch.zeros(outputs), torch.ones(outputs))

    def network(self) -> Network:
        parameters = {n: p.detach() for n, p in self.module.named_parameters()}
        likelihood = Gaussian(torch.zeros(1)) if self.kind == "regression" else Categorical()
        prior = dict.fromkeys(parameters, PRECISION)
        return Network(self.module, parameters, dict(self.module.named_buffers()), likelihood, prior)


def regression(points: int = 1000, test: int = 1000) -> Problem:
    """MLP 8-50-50-1, 3,051 weights."""
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(8, 50), nn.Tanh(), nn.Linear(50, 50), nn.Tanh(), nn.Linear(50, 1))
    x = torch.randn(points, 8)
    return Problem(module, x, torch.sin(x[:, :1]) + 0.1 * torch.randn(points, 1), torch.randn(test, 8), "regression")


def images(points: int = 2000, test: int = 200) -> Problem:
    """A LeNet-like network, 114,314 weights, on 28 x 28 pixels and 10 classes."""
    torch.manual_seed(0)
    module = nn.Sequential(
        *(nn.Conv2d(1, 16, 5, padding=2), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Conv2d(16, 32, 5, padding=2), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Flatten(), nn.Linear(1568, 64), nn.ReLU(), nn.Linear(64, 10)),
    )
    x, y = torch.randn(points, 1, 28, 28), torch.randint(0, 10, (points,))
    return Problem(module, x, y, torch.randn(test, 1, 28, 28), "classification")


# ---------------------------------------------------------------------------------------- ours


def _jacobians(problem: Problem, last_layer: bool = False) -> Jacobians:
    network = problem.network()
    jacobians = Jacobians(network, last_layer_names(network, problem.x[:2]) if last_layer else None)
    jacobians.learn_shapes(problem.x[:CHECKED_POINTS])
    return jacobians


def _fit(problem: Problem, structure: Structure, last_layer: bool = False) -> tuple[Jacobians, Any]:
    """What `Laplace.fit` does for the curvature."""
    with true_float32(), torch.no_grad():
        jacobians = _jacobians(problem, last_layer)
        passes = TrainingPasses(
            problem.task(), jacobians, OutputCurvature(), "expand", False, Repairs(), lambda *_: None
        )
        return jacobians, fit_structure(structure, passes)


def _our_posterior(problem: Problem, structure: Structure) -> LinearisedLaplace:
    jacobians, curvature = _fit(problem, structure)
    gaussian = curvature.gaussian(torch.full((len(curvature.groups),), PRECISION, dtype=torch.float64))
    return LinearisedLaplace(jacobians, gaussian, problem.network().likelihood, FitReport(), {})


def _our_fit(problem: Problem, structure: Structure, last_layer: bool = False) -> Run:
    def run() -> BlockCurvature | FullCurvature:
        curvature = _fit(problem, structure, last_layer)[1]
        if isinstance(curvature, FullCurvature):
            curvature.isotropic_eigen()
        return curvature

    return run


def _our_matrix(problem: Problem) -> Run:
    """H itself, P x P, which the runner forms where it is the smaller side."""

    def run() -> FullCurvature:
        with true_float32(), torch.no_grad():
            jacobians = _jacobians(problem)
            passes = TrainingPasses(
                problem.task(), jacobians, OutputCurvature(), "expand", False, Repairs(), lambda *_: None
            )
            rows = sum(jacobians.sizes().values())
            return fit_full(jacobians, passes.batches(), rows, Repairs())

    return run


def _our_evidence(problem: Problem) -> Run:
    """Adam on log λ, as in laplace-torch; the eigendecomposition is timed too."""
    task, network = problem.task(), problem.network()
    _, fitted = _fit(problem, "full")

    def run() -> Tensor:
        curvature: Curvature = FullCurvature(fitted.rows, fitted.gram, fitted.sizes, fitted.dtype, Repairs())
        log_precision = torch.zeros(1, dtype=torch.float64, requires_grad=True)
        optimizer = torch.optim.Adam([log_precision], lr=0.1)
        loglik, squares = log_likelihood(task, network), _square(network)
        for _ in range(STEPS):
            optimizer.zero_grad()
            (-log_evidence(loglik, squares, curvature, log_precision.exp())).backward()
            optimizer.step()
        return log_precision.exp().detach()

    return run


def _square(network: Network) -> Tensor:
    return torch.stack([p.double().square().sum() for p in network.parameters.values()]).sum().reshape(1)


def _our_predictions(problem: Problem, structure: Structure, batch_size: int) -> Run:
    posterior = _our_posterior(problem, structure)

    def run() -> list[object]:
        out: list[object] = []
        for x in problem.test.split(batch_size):
            moments = posterior.moments(x)
            if problem.kind == "classification":
                out.append(probit_log_probs(moments.mean, variances(moments.covariance)[0]).exp())
            else:
                out.append(moments)
        return out

    return run


# ------------------------------------------------------------------------------ laplace-torch


def _peer(problem: Problem, structure: str, backend: str, weights: str = "all") -> Any:
    import laplace
    from laplace import curvature

    kind: Any = problem.kind
    return laplace.Laplace(
        problem.module,
        kind,
        subset_of_weights=weights,
        hessian_structure=structure,
        prior_precision=PRECISION,
        backend=getattr(curvature, PEERS[backend]),
    )


def _peer_fit(problem: Problem, structure: str, backend: str, batch_size: int, weights: str = "all") -> Run:
    loader = problem.loader(batch_size)

    def run() -> Any:
        la = _peer(problem, structure, backend, weights)
        la.fit(loader, progress_bar=False)
        return la

    return run


def _ready(fit: Run) -> Run:
    """The fit and the covariance factor that predictions need."""

    def run() -> Any:
        la: Any = fit()
        return la.posterior_scale

    return run


def _peer_evidence(problem: Problem, backend: str) -> Run:
    la: Any = _peer_fit(problem, "full", "asdl", 1000)()

    def run() -> None:
        la.optimize_prior_precision(method="marglik", pred_type="glm", n_steps=PEER_STEPS, lr=0.1)

    return run


def _peer_predictions(problem: Problem, structure: str, backend: str, fit_batch: int, batch_size: int) -> Run:
    la: Any = _peer_fit(problem, structure, backend, fit_batch)()

    def run() -> list[Any]:
        return [la(x, pred_type="glm", link_approx="probit") for x in problem.test.split(batch_size)]

    return run


# ------------------------------------------------------------------------------ other than Laplace


def _our_networks() -> Run:
    problem = regression()
    task, model = problem.task(), MLP((50, 50), "tanh")
    schedule = Schedule(optimizer="adam", epochs=EPOCHS, batch_size=128, lr=1e-3)
    config = TrainingConfig(model, schedule, Isotropic(PRECISION), NoiseRule("fixed", 1.0))
    progress = Console(io.StringIO()).progress()

    def run() -> None:
        group = LaneTrainer(config, [Lane(task, seed) for seed in range(LANES)], torch.device("cpu"))
        with tempfile.TemporaryDirectory() as folder, stop_on_signals() as stop:
            group.train(Path(folder) / "checkpoint", progress, stop)

    return run


def _networks_in_turn() -> None:
    problem = regression()
    for seed in range(LANES):
        torch.manual_seed(seed)
        network = MLP((50, 50), "tanh").build(problem.task().spec)
        optimizer = torch.optim.Adam(network.parameters(), lr=1e-3, weight_decay=PRECISION / len(problem.x))
        for _ in range(EPOCHS):
            for index in torch.randperm(len(problem.x)).split(128):
                loss = 0.5 * (network(problem.x[index]) - problem.y[index]).square().mean()
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()


def _python(*words: str) -> None:
    subprocess.run([sys.executable, *words], check=True, stdout=subprocess.DEVNULL)


# --------------------------------------------------------------------------------------- cases


@dataclass(frozen=True)
class Case:
    """One case of the table.

    Args:
        name: Name on the command line.
        what: Description in the table.
        make: Prepares a side, given its name.
        target: Intended ratio to our time, by peer ("default", "best").
        sides: Names of the sides.
        peers_part: A peer runs one in `peers_part` of the equal steps, and its time is multiplied by that.
    """

    name: str
    what: str
    make: Callable[[str], Run]
    target: dict[str, float]
    sides: tuple[str, ...] = ("ours", *PEERS)
    peers_part: float = 1


def _sides(ours: Callable[[], Run], peer: Callable[[str], Run]) -> Callable[[str], Run]:
    return lambda side: BOUNDS[side]() if side in BOUNDS else ours() if side == "ours" else peer(side)


def cases() -> Iterator[Case]:
    """Every case of the table."""
    yield Case(
        "full_matrix",
        "GGN of 3,051 weights, N = 1,000: the matrix",
        _sides(lambda: _our_matrix(regression()), lambda b: _peer_fit(regression(), "full", b, 1000)),
        {"default": 30, "best": 4},
        sides=("ours", *PEERS, next(iter(BOUNDS))),
    )
    yield Case(
        "full_fit",
        "the same, with everything that predictions need",
        _sides(lambda: _our_fit(regression(), "full"), lambda b: _ready(_peer_fit(regression(), "full", b, 1000))),
        {"default": 30, "best": 4},
        sides=("ours", *PEERS, list(BOUNDS)[1]),
    )
    yield Case(
        "evidence",
        f"{STEPS} isotropic evidence steps on it (peer: {PEER_STEPS} steps, scaled by {STEPS // PEER_STEPS})",
        _sides(lambda: _our_evidence(regression()), lambda b: _peer_evidence(regression(), b)),
        {"default": 300},
        sides=("ours", "default"),
        peers_part=STEPS / PEER_STEPS,
    )
    yield Case(
        "full_predictive",
        "closed-form predictive of 1,000 points",
        _sides(
            lambda: _our_predictions(regression(), "full", 1000),
            lambda b: _peer_predictions(regression(), "full", b, 1000, 1000),
        ),
        {"best": 5},
    )
    yield Case(
        "kfac_fit",
        "KFAC fit, LeNet-like (114,314 weights), N = 2,000, batch 256",
        _sides(lambda: _our_fit(images(), "kfac"), lambda b: _peer_fit(images(), "kron", b, 256)),
        {"best": 1.3},
    )
    yield Case(
        "kfac_predictive",
        "KFAC predictive of 200 points, peer's batch 16",
        _sides(
            lambda: _our_predictions(images(), "kfac", 200),
            lambda b: _peer_predictions(images(256), "kron", b, 256, 16),
        ),
        {"best": 20},
    )
    yield Case(
        "kfac_predictive_256",
        "KFAC predictive of 256 points, one batch",
        _sides(
            lambda: _our_predictions(images(test=256), "kfac", 256),
            lambda b: _peer_predictions(images(256, 256), "kron", b, 256, 256),
        ),
        {},
    )
    yield Case(
        "diag_fit",
        "diagonal fit, peer's batch 32",
        _sides(lambda: _our_fit(images(), "diag"), lambda b: _peer_fit(images(), "diag", b, 32)),
        {"best": 1.5},
    )
    yield Case(
        "diag_predictive",
        "diagonal predictive of 200 points, peer's batch 16",
        _sides(
            lambda: _our_predictions(images(), "diag", 200),
            lambda b: _peer_predictions(images(256), "diag", b, 32, 16),
        ),
        {"best": 10},
    )
    yield Case(
        "last_layer_fit",
        "full fit of the last layer (650 weights), N = 2,000, batch 256",
        _sides(
            lambda: _our_fit(images(), "full", last_layer=True),
            lambda b: _ready(_peer_fit(images(), "full", b, 256, "last_layer")),
        ),
        {},
    )
    yield Case(
        "networks",
        f"{LANES} MLPs 8-50-50-1, N = 1,000, {EPOCHS} epochs of Adam, batch 128",
        _sides(_our_networks, lambda _: _networks_in_turn),
        {},
        sides=("ours", "one by one"),
    )
    yield Case(
        "help",
        "`bnn-run --help` and `import torch`",
        _sides(
            lambda: partial(_python, "-m", "bnn_runner.cli.main", "--help"),
            lambda _: partial(_python, "-c", "import torch"),
        ),
        {},
        sides=("ours", "import torch"),
    )
