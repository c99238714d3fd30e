"""Which rule for the prior precision makes Laplace's predictions good on classes: a study, by validation.

    python scripts/laplace_defaults.py                 all cells (about half an hour on one core)
    python scripts/laplace_defaults.py --only digits   cells whose name contains a word; the others are kept
    python scripts/laplace_defaults.py --page          write the page again from the kept numbers

A cell is a data set, a network and a seed. Its networks are trained once (and kept in --folder), one curvature per
structure is fitted, and every rule selects a posterior from it. Writes outputs/results/laplace_defaults.csv after each
cell, and laplace_defaults.md at the end; the same command resumes.

Every rule is compared with the network itself by differences at the same points. "Validation" is by two halves: a rule
that selects by validation selects on one half and is scored on the other, and the other way round; rules by the
evidence are scored on both. The default is chosen by these numbers alone. "Test" selects by the whole validation part.
Scores are by 200 draws, half of them the others mirrored.
"""

from __future__ import annotations

import argparse
import csv
import math
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from laplace_defaults_page import page
from torch import Tensor

import bnn_runner
from bnn_runner.base import FitContext, HyperRule, Network
from bnn_runner.curvature.base import Curvature, WeightGaussian
from bnn_runner.curvature.jacobians import CHECKED_POINTS, Jacobians
from bnn_runner.curvature.psd import Repairs
from bnn_runner.curvature.structures import fit_structure
from bnn_runner.errors import RunFailed
from bnn_runner.hyper.evidence import Evidence
from bnn_runner.hyper.grid import LABELS
from bnn_runner.hyper.validation_choice import preferred
from bnn_runner.laplace.g_prior import g_prior
from bnn_runner.laplace.scale_invariance import scale_invariant
from bnn_runner.laplace.select import select_precisions
from bnn_runner.laplace.weak_prior import too_weak
from bnn_runner.methods.laplace import Laplace
from bnn_runner.methods.laplace_subnetwork import LaplaceSubnetwork
from bnn_runner.metrics.blocks import Blocks, permutations, uniform_counts
from bnn_runner.metrics.log_mean import group_bounds, log_mean
from bnn_runner.rng import generator
from bnn_runner.runtime.torch_state import true_float32
from bnn_runner.tasks import Task
from bnn_runner.training.schedules import Schedule

RESULTS = Path(__file__).resolve().parents[1] / "outputs" / "results"
HALF_DRAWS = 100
PRECISIONS = torch.logspace(-2, 8, 21, dtype=torch.float64)
TEMPERATURES = (1.0, 1 / 4, 1 / 16, 1 / 64)
SELECTIONS = {"marginal": ("marginal", 0.0), "marginal, 0.5 SE": ("marginal", 0.5), "marginal, 1 SE": ("marginal", 1.0)}
SELECTIONS |= {"dyadic": ("dyadic", 0.0)}
"""Scores, and how many standard errors below the best."""
TANGENT_PASSES = 100
MAX_POINTS = 1000


@dataclass(frozen=True)
class Case:
    """A data set with a network, and the structures that are compared on it."""

    data: str
    model: str
    words: tuple[str, ...] = ()
    structures: tuple[str, ...] = ("auto",)
    seeds: tuple[int, ...] = (0, 1, 2)

    @property
    def name(self) -> str:
        return f"{self.data} {self.model}"


STRUCTURES = ("full", "kfac", "last_layer", "subnetwork")
TABLES = ("australian", "banana", "breast_cancer", "breast_cancer_uci", "digits", "digits_uci", "ionosphere")
TABLES += ("satellite", "two_moons", "vehicle", "waveform", "wine")
NORMS = ("mlp_batchnorm", "mlp_layernorm")
LIKE_MLP = ("model.hidden=[50]", "model.activation=tanh", "schedule.lr=0.01", "schedule.batch_size=64")
MNIST = ("data.train_size=2000", "data.test_size=1000", "schedule.epochs=10")
CIFAR = ("data.train_size=2000", "data.test_size=500", "schedule.epochs=10", "schedule.batch_size=64")
CASES = (
    *(Case(data, "mlp") for data in TABLES),
    *(Case(data, "mlp", structures=STRUCTURES) for data in ("glass",)),
    *(
        Case(data, model, ("schedule.epochs=100", *LIKE_MLP))
        for data in ("glass", "vehicle", "wine")
        for model in NORMS
    ),
    Case("mnist", "lenet_small", MNIST),
    Case("fashion_mnist", "lenet_small", MNIST),
    Case("cifar10", "cnn", CIFAR, ("kfac", "last_layer")),
    Case("cifar10", "cnn_batchnorm", CIFAR, ("kfac", "last_layer")),
    Case("cifar10", "cnn_groupnorm", CIFAR),
    Case("cifar10", "cnn_standardised", CIFAR),
    Case("cifar10", "resnet18_frn", ("model.widths=[8,16,16,32]", *CIFAR)),
    Case("cifar10", "resnet20", ("data.train_size=2000", "data.test_size=500", "schedule.epochs=8")),
    Case("cifar100_subset", "lenet", ("data.train_size=4000", "data.test_size=500"), ("last_layer",)),
    Case("sst2", "text_transformer", ("data.test_size=500",), ("last_layer",)),
)
WHOLE = ("auto", "full", "kfac")
"""Structures over all weights."""
WITH_G = ("full", "kfac")
"""Structures on which the g-prior is compared too."""


@dataclass(frozen=True)
class Row:
    """Differences to the network itself, in nats per point (marginal) or block (dyadic, kappa = 2), with errors."""

    data: str
    model: str
    seed: int
    structure: str
    rule: str
    precision: float
    temperature: float
    validation_points: int
    test_points: int
    validation_marginal: float
    validation_marginal_error: float
    validation_dyadic: float
    validation_dyadic_error: float
    test_centre: float
    test_marginal: float
    test_marginal_error: float
    test_centre_dyadic: float
    test_dyadic: float
    test_dyadic_error: float
    test_accuracy: float
    seconds: float
    note: str = ""


class Points:
    """The validation and test points of a task, with the blocks of each part."""

    def __init__(self, task: Task, seed: int) -> None:
        order = torch.randperm(len(task.val), generator=generator(seed, "halves"))[:MAX_POINTS]
        half = len(order) // 2
        test = torch.arange(min(len(task.test), MAX_POINTS))
        self.count = len(order)
        self.parts = {
            "first": torch.arange(half),
            "second": torch.arange(half, len(order)),
            "validation": torch.arange(len(order)),
            "test": len(order) + test,
        }
        x, y = zip(task.val.gather(order), task.test.gather(test), strict=True)
        assert all(t is not None for t in y)
        self.x, self.y = torch.cat(x), torch.cat([t for t in y if t is not None])
        self.blocks = {name: list(_blocks(part)) for name, part in self.parts.items() if len(part) > 1}


def _blocks(part: Tensor, repeats: int = 4) -> Iterator[Blocks]:
    """Dyadic blocks of 10 labels over 2 points, in several permutations of a part."""
    for repeat, order in enumerate(permutations(part, repeats, 0, "laplace defaults")):
        count = len(part) // 2
        stream = generator(0, "laplace defaults", len(part), repeat)
        yield Blocks(part[order[: 2 * count].reshape(count, 2)], uniform_counts(count, 2, 10, stream))


class Candidate:
    """A posterior by its draws' logits; scores are computed when they are needed, and kept."""

    def __init__(self, scorer: Scorer, precision: float, moved: Tensor, temperature: float = 1.0) -> None:
        self.scorer, self.precision, self.moved, self.temperature = scorer, precision, moved, temperature
        self._scores: dict[tuple[str, str], Tensor] = {}

    @cached_property
    def outputs(self) -> Tensor:
        """[2S, N, K]."""
        away = self.moved.double() * self.temperature**0.5
        return torch.cat([self.scorer.centre + away, self.scorer.centre - away])

    @cached_property
    def loglik(self) -> Tensor:
        """[2S, N]; the logits are not kept."""
        found = self.scorer.network.likelihood.log_prob(self.outputs, self.scorer.points.y)
        del self.outputs
        return found

    def score(self, score: str, part: str) -> Tensor:
        """Marginal and accuracy [1, n], dyadic [R, M], of a part of the points."""
        if (score, part) not in self._scores:
            self._scores[score, part] = self._scored(score, self.scorer.points.parts[part], part)
        return self._scores[score, part]

    def _scored(self, score: str, chosen: Tensor, part: str) -> Tensor:
        if score == "accuracy":
            preferred_class = self.outputs[:, chosen].softmax(-1).mean(0).argmax(-1)
            return (preferred_class == self.scorer.points.y[chosen]).double().unsqueeze(0)
        if score == "marginal":
            each = self.loglik[:, chosen]
            return torch.logsumexp(each, 0, keepdim=True) - math.log(len(each))
        weights = torch.full((len(self.loglik),), -math.log(len(self.loglik)), dtype=torch.float64)
        bounds = group_bounds(len(self.loglik))
        return log_mean(self.loglik, weights, self.scorer.points.blocks[part], bounds).values()


class Scorer:
    """Scores posteriors over one network's weights at its points."""

    def __init__(self, task: Task, network: Network, jacobians: Jacobians, points: Points) -> None:
        self.network, self.jacobians, self.points = network, jacobians, points
        size = jacobians.batch_size(task.spec.num_outputs, use=HALF_DRAWS)
        self.pieces = points.x.split(size)
        with torch.no_grad():
            self.centre = torch.cat([network(x) for x in self.pieces]).double()

    def moved(self, gaussians: Sequence[WeightGaussian]) -> list[Tensor]:
        """J δ [S, N, K] of each; one pass over the Jacobians for as many as 0.5 GiB of weights allow."""
        sizes = list(self.jacobians.sizes().values())
        at_once = max(1, 2**27 // (sum(sizes) * HALF_DRAWS))
        found: list[Tensor] = []
        for first in range(0, len(gaussians), at_once):
            some = gaussians[first : first + at_once]
            deltas = [g.sample(1, 0, HALF_DRAWS).split(sizes, dim=1) for g in some]
            parts: list[list[Tensor]] = [[] for _ in some]
            for x in self.pieces:
                tensors = self.jacobians(x).tensors.values()
                for part, delta in zip(parts, deltas, strict=True):
                    each = [j.apply(d.contiguous()) for j, d in zip(tensors, delta, strict=True)]
                    part.append(sum(each[1:], each[0]).permute(2, 0, 1))
            found += [torch.cat(part, 1) for part in parts]
        return found


def mean_and_error(each: Tensor) -> tuple[float, float]:
    """Of differences [R, M]: the mean, and its error over the M units of one permutation."""
    mean = float(each.mean())
    return mean, float((each.var(dim=1).mean() / each.shape[1]).sqrt()) if each.shape[1] > 1 else float("nan")


class Comparison:
    """Rows of one network and structure."""

    def __init__(self, case: Case, seed: int, structure: str, centre: Candidate, points: Points) -> None:
        self.case, self.seed, self.structure, self.centre, self.points = case, seed, structure, centre, points
        self.prior = min(centre.scorer.network.prior_precision.values())
        self.rows: list[Row] = []

    def selected(self, rule: str, candidates: Sequence[Candidate], by: str, seconds: float) -> None:
        """A rule by validation: on each half for the other, on the whole for the test points."""

        least = sum(c.precision < self.prior for c in candidates)  # as hyper=grid

        def pick(part: str) -> Candidate:
            score, standard_errors = SELECTIONS[by]
            i = preferred([c.score(score, part) for c in candidates], standard_errors, least, LABELS[score])
            assert i is not None
            return candidates[i]

        if self.points.count < 8:
            return
        first, second = pick("first"), pick("second")
        self._row(rule, pick("validation"), {"second": first, "first": second}, seconds)

    def fixed(self, rule: str, candidate: Candidate, seconds: float, note: str = "") -> None:
        """A rule that does not see the validation part."""
        self._row(rule, candidate, {"first": candidate, "second": candidate}, seconds, note)

    def _row(
        self, rule: str, final: Candidate, halves: Mapping[str, Candidate], seconds: float, note: str = ""
    ) -> None:
        def difference(score: Any, part: str, candidate: Candidate) -> Tensor:
            return candidate.score(score, part) - self.centre.score(score, part)

        held = {s: torch.cat([difference(s, h, c) for h, c in halves.items()], 1) for s in ("marginal", "dyadic")}
        self.rows.append(
            Row(
                self.case.data, self.case.model, self.seed, self.structure, rule, final.precision, final.temperature,
                self.points.count, len(self.points.parts["test"]),
                *mean_and_error(held["marginal"]), *mean_and_error(held["dyadic"]),
                float(self.centre.score("marginal", "test").mean()),
                *mean_and_error(difference("marginal", "test", final)),
                float(self.centre.score("dyadic", "test").mean()), *mean_and_error(difference("dyadic", "test", final)),
                float(difference("accuracy", "test", final).mean()), seconds, note,
            )
        )  # fmt: skip


def rows_of(case: Case, seed: int, folder: str) -> list[Row]:
    """All rules on all structures of one network."""
    words = [f"data={case.data}", f"model={case.model}", *case.words, "method=map", f"seed={seed}"]
    words += ["threads=1", "figures=false", "metric=[marginal]", f"output_dir={folder}", "time_limit=null"]
    run = bnn_runner.run(words, quiet=True)
    task, network, points = run.task, run.network, Points(run.task, seed)
    rows: list[Row] = []
    with true_float32(), torch.no_grad():
        for structure in case.structures:
            rows += _of_structure(case, seed, structure, task, network, points)
    return rows


def _of_structure(case: Case, seed: int, structure: str, task: Task, network: Network, points: Points) -> list[Row]:
    begin = time.perf_counter()
    context = FitContext(seed=seed, hyper=Evidence(), schedule=Schedule(epochs=1, batch_size=64, lr=0.01))
    repairs = Repairs()
    few = task.train.gather(torch.arange(min(CHECKED_POINTS, len(task.train))))[0]
    if structure == "subnetwork":
        chosen = LaplaceSubnetwork(num_weights=min(500, network.num_parameters // 2))._chosen(task, network, context)
        jacobians, method = Jacobians(network, tuple(chosen.places), chosen.places), Laplace(structure="full")
        basis = Laplace()._basis(network, task)
    else:
        last = structure == "last_layer"
        method = Laplace(structure="full" if last else structure, weights="last_layer" if last else "all")
        basis = method._basis(network, task)
        jacobians = Jacobians(network, basis.names)
    jacobians.learn_shapes(few)
    curvature = fit_structure(method._structure(task, jacobians), method.passes(jacobians, task, context, repairs))
    scorer = Scorer(task, network, jacobians, points)
    centre = Candidate(scorer, math.inf, torch.zeros(1, *scorer.centre.shape))
    compare, fitted = Comparison(case, seed, structure, centre, points), time.perf_counter() - begin

    def by_evidence(rule: HyperRule, mode: Any) -> tuple[WeightGaussian, float, float, str]:
        begin = time.perf_counter()
        selection = select_precisions(task, jacobians, basis, curvature, rule, repairs, mode, 1e-4, TANGENT_PASSES)
        precision = selection.facts.get("prior_precision")
        reached = "" if selection.facts.get("tangent_settled", True) else "v* not reached"
        found = float("nan") if precision is None else float(precision)
        return selection.gaussian, found, fitted + time.perf_counter() - begin, reached

    modes = {"w*": "network", "v*": "tangent"} if structure in WHOLE else {"w*": "network"}
    rules: dict[str, HyperRule] = {"evidence": Evidence()}
    if not jacobians.chosen and scale_invariant(network, few, jacobians.names).names:
        rules["groupwise"] = Evidence(family="groupwise")
    if structure in WITH_G:
        rules["g"] = Evidence(family="g")
    for name, rule in rules.items():
        for place, mode in modes.items():
            try:
                gaussian, precision, seconds, note = by_evidence(rule, mode)
            except RunFailed as error:
                print(f"    {name} at {place}: {error}", file=sys.stderr)
                continue
            [moved] = scorer.moved([gaussian])
            compare.fixed(f"{name} at {place}", Candidate(scorer, precision, moved), seconds, note)
            if name == "evidence" and place == "w*":
                cooled = [Candidate(scorer, precision, moved, t) for t in TEMPERATURES]
                compare.selected("evidence at w*, temperature by marginal", cooled, "marginal", seconds)
    for family, shaped in _families(structure, curvature, task, repairs).items():
        begin = time.perf_counter()
        grid = _candidates(scorer, shaped)
        seconds = fitted + time.perf_counter() - begin
        for by in SELECTIONS:
            compare.selected(f"grid{family} by {by}", grid, by, seconds)
    return compare.rows


def _families(structure: str, curvature: Curvature, task: Task, repairs: Repairs) -> dict[str, Curvature]:
    found = {"": curvature}
    if structure in WITH_G:
        found[" g"] = g_prior(curvature, len(task.train), repairs).curvature
    return found


def _candidates(scorer: Scorer, curvature: Curvature) -> list[Candidate]:
    """Every precision, ascending; without those that are too weak."""
    start = torch.ones(len(curvature.groups), dtype=torch.float64)
    gaussians = {float(p): curvature.gaussian(p * start) for p in PRECISIONS}
    usable = {p: g for p, g in gaussians.items() if not too_weak(g)}
    moved = zip(usable, scorer.moved(list(usable.values())), strict=True)
    return [Candidate(scorer, p, m) for p, m in moved if bool(torch.isfinite(m).all())]


def read_rows() -> list[Row]:
    path = RESULTS / "laplace_defaults.csv"
    if not path.is_file():
        return []
    kinds = {f.name: {"str": str, "int": int, "float": float}[str(f.type)] for f in fields(Row)}
    with path.open(encoding="utf-8", newline="") as file:
        return [Row(**{k: kinds[k](v) for k, v in row.items()}) for row in csv.DictReader(file)]


def write_rows(rows: Sequence[Row]) -> None:
    RESULTS.mkdir(parents=True, exist_ok=True)
    with (RESULTS / "laplace_defaults.csv").open("w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, [f.name for f in fields(Row)], lineterminator="\n")
        writer.writeheader()
        for row in rows:
            writer.writerow({k: f"{v:.6g}" if isinstance(v, float) else v for k, v in asdict(row).items()})


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="a word in the names of the cells to run")
    parser.add_argument("--folder", default="outputs/laplace_defaults", help="folder of the trained networks")
    parser.add_argument("--page", action="store_true", help="run nothing")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    rows = read_rows()
    for case in CASES:
        for seed in case.seeds:
            if arguments.page or arguments.only not in case.name:
                continue
            if any((r.data, r.model, r.seed) == (case.data, case.model, seed) for r in rows):
                continue
            begin = time.perf_counter()
            try:
                rows += rows_of(case, seed, arguments.folder)
            except bnn_runner.errors.UserError as error:
                print(f"{case.name}: not available: {error}", file=sys.stderr)
                break
            write_rows(rows)
            print(f"{case.name} seed {seed}: {time.perf_counter() - begin:.0f} s", file=sys.stderr, flush=True)
    (RESULTS / "laplace_defaults.md").write_text(page([asdict(row) for row in rows]), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
