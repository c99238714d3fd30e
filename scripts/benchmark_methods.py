"""Cost of a method's steps divided by the cost of a reference, with the limit that each ratio must keep.

Writes outputs/results/method_costs.{csv,md}.

    python scripts/benchmark_methods.py                 all rows, some two minutes
    python scripts/benchmark_methods.py bbb_local       one row
    python scripts/benchmark_methods.py --quick         fewer repeats, nothing is written

Both sides of a row take turns in one process on one thread. They are measured in CPU time, which other programs disturb
least, and the ratio is the median over pairs. A row of ROWS has a function that gives both sides (the method and its
reference) and a limit for their ratio. Exit code 1 if a ratio exceeds its limit.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path

import torch
from torch import Tensor
from torch.func import functional_call

from bnn_runner.base import Network
from bnn_runner.mcmc.chains import ChainBatches
from bnn_runner.mcmc.dynamics import ChainState, langevin
from bnn_runner.mcmc.hamiltonian import Point, leapfrog
from bnn_runner.mcmc.noise import ChainNoise
from bnn_runner.mcmc.target import LogPosterior
from bnn_runner.methods.bbb import BBB
from bnn_runner.models.likelihoods import NoiseRule
from bnn_runner.models.mlp import MLP
from bnn_runner.models.priors import Isotropic
from bnn_runner.posteriors.swag_moments import PathMoments
from bnn_runner.runs.cell import table_text
from bnn_runner.runtime.files import write_text
from bnn_runner.runtime.torch_state import evaluation_mode, training_mode
from bnn_runner.tasks import Split, Task, TaskSpec
from bnn_runner.training.engine import LaneTrainer
from bnn_runner.training.schedules import Schedule
from bnn_runner.training.state import Lane, TrainingConfig

CPU = torch.device("cpu")
RESULTS = Path(__file__).resolve().parents[1] / "outputs" / "results"
Pair = tuple[Callable[[], object], Callable[[], object]]


@dataclass(frozen=True)
class Row:
    """`work` is a context that gives two functions to time: the method's and the reference's."""

    name: str
    compared: str
    limit: float
    work: Callable[[], contextmanager[Pair]]


@dataclass(frozen=True)
class Result:
    row: str
    compared: str
    ratio: float
    limit: float
    method_ms: float
    other_ms: float
    pairs: int


def _mnist_sized() -> tuple[Task, LaneTrainer]:
    """1,280 random points and the engine for MLP 784-400-400-10, batch 128."""
    g = torch.Generator().manual_seed(0)
    count = 1280
    train = Split(
        torch.randn(count, 784, generator=g), torch.randint(0, 10, (count,), generator=g), torch.arange(count)
    )
    few = train.subset(torch.arange(10))
    spec = TaskSpec("random", "classification", (784,), 10, 0.0)
    task = Task(spec, train, few, few, {}, "random", torch.zeros(10), torch.ones(10))
    schedule = Schedule(epochs=1000, batch_size=128, lr=1e-3)
    model = MLP(hidden=(400, 400), activation="relu")
    config = TrainingConfig(model, schedule, Isotropic(1.0), NoiseRule())
    return task, LaneTrainer(config, [Lane(task, 0)], CPU)


def _bbb(method: BBB) -> Callable[[], object]:
    """A step of Bayes by Backprop and a step of MAP."""

    @contextmanager
    def work() -> Iterator[Pair]:
        task, group = _mnist_sized()
        fit = method.begin(task, group.network(0), group.config.schedule, 0)
        with group.training_mode(), training_mode(fit.module):
            yield fit.update, group.advance

    return work


@contextmanager
def _swag_epoch() -> Iterator[Pair]:
    """Ten steps with one collection of the weights (an epoch of 1,280 points), and ten steps without."""
    _, group = _mnist_sized()
    moments = PathMoments(rank=20)

    def steps() -> None:
        for _ in range(10):
            group.advance()

    def epoch() -> None:
        steps()
        moments.collect(list(group.state.parameters.values()))

    with group.training_mode():
        yield epoch, steps


def _small_task(num_train: int, seed: int) -> Task:
    """A regression of the size of UCI boston: 13 inputs."""
    g = torch.Generator().manual_seed(seed)
    x, y = torch.randn(num_train, 13, generator=g), torch.randn(num_train, 1, generator=g)
    train = Split(x, y, torch.arange(num_train))
    few = train.subset(torch.arange(10))
    spec = TaskSpec("random", "regression", (13,), 1, 0.0)
    return Task(spec, train, few, few, {}, "random", torch.zeros(1), torch.ones(1))


def _small_networks(count: int) -> tuple[Task, list[Network]]:
    """`count` untrained networks 13-50-1 of one task of 455 points."""
    task = _small_task(455, 0)
    config = TrainingConfig(MLP(hidden=(50,)), Schedule(epochs=1000, batch_size=32), Isotropic(1.0), NoiseRule())
    group = LaneTrainer(config, [Lane(task, i) for i in range(count)], CPU)
    return task, [group.network(i) for i in range(count)]


@contextmanager
def _sgld_chains() -> Iterator[Pair]:
    """Twenty steps of 8 SGLD chains together, and of each chain in turn."""
    task, networks = _small_networks(8)

    def chain(members: Sequence[int]) -> Callable[[], object]:
        target = LogPosterior([networks[i] for i in members], networks[0], len(task.train), torch.float32)
        batches = ChainBatches(task.train, members, 32)
        noise = ChainNoise(members, "bench", target.layout.size, torch.float32, CPU)

        def steps() -> None:
            state = ChainState.at(target.start)
            for t in range(20):
                _, gradient = target(state.position, *batches.at(t))
                state = langevin(state, gradient, 1e-6, 1.0, noise.at(t))

        return steps

    together, alone = chain(range(8)), [chain([i]) for i in range(8)]
    with evaluation_mode(networks[0].module):
        yield together, lambda: [steps() for steps in alone]


@contextmanager
def _uci_splits() -> Iterator[Pair]:
    """Twenty training steps of 20 splits together, and of each split in turn."""
    config = TrainingConfig(MLP(hidden=(50,)), Schedule(epochs=1000, batch_size=32), Isotropic(1.0), NoiseRule())
    lanes = [Lane(_small_task(455, i), i) for i in range(20)]
    together = LaneTrainer(replace(config, stack="always"), lanes, CPU)
    alone = [LaneTrainer(config, [lane], CPU) for lane in lanes]

    def steps(groups: Sequence[LaneTrainer]) -> None:
        for group in groups:
            for _ in range(20):
                group.advance()

    with ExitStack() as stack:
        for group in (together, *alone):
            stack.enter_context(group.training_mode())
        yield lambda: steps([together]), lambda: steps(alone)


@contextmanager
def _leapfrogs() -> Iterator[Pair]:
    """A trajectory of 50 leapfrog steps of 4 chains, and a bare loop: autograd over the same stacked network."""
    task, networks = _small_networks(4)
    reference = networks[0]
    target = LogPosterior(networks, reference, len(task.train), torch.float64)
    x, y = (t.double().expand(4, *t.shape) for t in (task.train.inputs, task.train.targets) if t is not None)
    point = Point.at(target.start, lambda w: target(w, x, y))
    momentum, step = torch.randn_like(target.start), 1e-4
    inverse, counts = torch.ones(target.layout.size, dtype=torch.float64), torch.full((4,), 50)

    def gradient(parameters: dict[str, Tensor]) -> dict[str, Tensor]:
        leaves = {name: p.detach().requires_grad_() for name, p in parameters.items()}
        outputs = functional_call(reference.module, leaves, (x,))
        log_prior = -0.5 * torch.stack([p.square().sum() for p in leaves.values()]).sum()
        value = target.likelihood.log_prob(outputs, y).sum() + log_prior
        return dict(zip(leaves, torch.autograd.grad(value, list(leaves.values())), strict=True))

    def bare() -> None:
        place = {name: p.clone() for name, p in target.layout.unflatten(target.start).items()}
        speed = {name: v.clone() for name, v in target.layout.unflatten(momentum).items()}
        slope = gradient(place)
        speed = {name: v + step / 2 * slope[name] for name, v in speed.items()}
        for i in range(50):
            place = {name: p + step * speed[name] for name, p in place.items()}
            slope = gradient(place)
            kick = step if i < 49 else step / 2
            speed = {name: v + kick * slope[name] for name, v in speed.items()}

    sizes = torch.full((4,), step, dtype=torch.float64)
    with evaluation_mode(reference.module):
        yield lambda: leapfrog(point, momentum, lambda w: target(w, x, y), sizes, counts, inverse), bare


ROWS = [
    Row("bbb_local", "MAP step", 3.5, _bbb(BBB(estimator="local"))),
    Row("bbb_flipout", "MAP step", float("inf"), _bbb(BBB(estimator="flipout"))),
    Row("bbb_weights", "MAP step", float("inf"), _bbb(BBB(estimator="weights"))),
    Row("swag_collection", "an epoch without it", 1.05, _swag_epoch),
    Row("sgld_8_chains", "one chain at a time", 0.25, _sgld_chains),
    Row("uci_20_splits", "one split at a time", 0.25, _uci_splits),
    Row("hmc_leapfrogs", "a bare loop", 1.0, _leapfrogs),
    Row("bbb_local_mixture", "MAP step", float("inf"), _bbb(BBB(estimator="local", prior="scale_mixture"))),
]


def _ms(work: Callable[[], object], repeats: int) -> float:
    begin = time.process_time()
    for _ in range(repeats):
        work()
    return 1000 * (time.process_time() - begin) / repeats


def measure(row: Row, pairs: int, repeats: int = 10) -> Result:
    with row.work() as (method, other):
        _ms(method, 3), _ms(other, 3)
        times = [(_ms(method, repeats), _ms(other, repeats)) for _ in range(pairs)]
    ratio = statistics.median(a / b for a, b in times)
    mine, theirs = (statistics.median(t[i] for t in times) for i in (0, 1))
    return Result(row.name, row.compared, ratio, row.limit, mine, theirs, pairs)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("rows", nargs="*", metavar="ROW", help=", ".join(r.name for r in ROWS))
    parser.add_argument("--quick", action="store_true", help="fewer repeats, write nothing")
    arguments = parser.parse_args()
    known = [r.name for r in ROWS]
    if unknown := [name for name in arguments.rows if name not in known]:
        parser.error(f"unknown row: {', '.join(unknown)}. The rows: {', '.join(known)}.")
    torch.set_num_threads(1)
    results = [measure(r, 3 if arguments.quick else 15) for r in ROWS if not arguments.rows or r.name in arguments.rows]
    lines = ["| row | compared with | ratio | limit | ms | reference, ms |", "|---|---|---:|---:|---:|---:|"]
    for r in results:
        limit = f"{r.limit:g}" if r.limit < float("inf") else ""
        lines.append(f"| {r.row} | {r.compared} | {r.ratio:.2f} | {limit} | {r.method_ms:.1f} | {r.other_ms:.1f} |")
    print("\n".join(lines))
    if not arguments.quick and not arguments.rows:
        write_text(RESULTS / "method_costs.md", "\n".join(lines) + "\n")
        columns = [f.name for f in fields(Result)]
        write_text(RESULTS / "method_costs.csv", table_text([asdict(r) for r in results], columns))
    return int(any(r.ratio > r.limit for r in results))


if __name__ == "__main__":
    sys.exit(main())
