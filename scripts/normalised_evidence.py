"""The effect of the prior precision on the predictions of a batchnorm network, and the evidence of each precision.

    python scripts/normalised_evidence.py [--data matern_1d,my_1d] [--out outputs/results] [--work outputs]

Trains a batchnorm MLP with two hidden layers of 50 on one-dimensional data without the middle fifth of the points by
input, and fits linearised Laplace with the full curvature under seven prior precisions: five fixed ones, and those with
the largest evidence at the trained weights w* and at the tangent model's own optimum v* (Antorán et al. 2022). Each has
a panel, with its test log-likelihood among the data and in the gap, whose points are known. The last two panels show
both evidences and both test log-likelihoods as functions of the precision. A second table has the largest evidence with
a single precision and with one precision per group of weights (each scale-invariant group, and the rest), with the
biases in the basis and held at MAP.

Writes normalised_evidence_DATA.png for each data set, and the numbers as normalised_evidence.csv and .md, and
normalised_evidence_choices.csv. Two minutes.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields, replace
from itertools import product
from pathlib import Path
from typing import Literal

import numpy as np
import torch
from matplotlib.axes import Axes
from torch import Tensor

import bnn_runner
from bnn_runner.base import FitContext, HyperRule, Network
from bnn_runner.curvature.parameter_subset import HeldKind
from bnn_runner.evaluation.closed_form import gaussian_log_prob
from bnn_runner.experiment import load_experiment
from bnn_runner.hyper.evidence import Evidence
from bnn_runner.hyper.fixed import Fixed
from bnn_runner.laplace.posterior import LinearisedLaplace
from bnn_runner.methods.laplace import Laplace
from bnn_runner.models.likelihoods import Gaussian
from bnn_runner.report import style
from bnn_runner.report.looks import look
from bnn_runner.runs.cell import table_text
from bnn_runner.runtime.files import write_text
from bnn_runner.tasks import Task
from bnn_runner.training.schedules import Schedule

TONE = look("laplace").colour
TONES = style.tints(TONE, 3)[1:]
"""Of w* and v*."""
PRECISIONS = (0.1, 1.0, 10.0, 100.0, 1000.0)
CURVE = torch.logspace(-2, 4, 37, dtype=torch.float64).tolist()
Where = Literal["network", "tangent"]
PLACES: dict[Where, str] = {"network": "w*", "tangent": "v*"}
HELD: dict[str, tuple[HeldKind, ...]] = {"in the basis": (), "held at MAP": ("bias",)}


@dataclass(frozen=True)
class Row:
    """Log evidences in nats at one precision, and closed-form test log-likelihoods: among the data, and in the gap."""

    data: str
    precision: float
    of: str
    evidence_at_w: float
    evidence_at_v: float
    newton_decrement: float
    test_loglik: float
    gap_loglik: float


@dataclass(frozen=True)
class Choice:
    """The largest log evidence (nats) of a family of precisions, and its test log-likelihoods (nats per point)."""

    data: str
    biases: str
    family: str
    at: str
    weights_in_basis: int
    groups: int
    lowest_precision: float
    highest_precision: float
    log_evidence: float
    status: str
    test_loglik: float
    gap_loglik: float


@dataclass(frozen=True)
class Problem:
    """A data set without its middle, the network trained on it, and which test points lie in that gap."""

    data: str
    task: Task
    network: Network
    in_gap: Tensor


def fitted(
    task: Task, network: Network, where: Where, rule: HyperRule, hold: tuple[HeldKind, ...] = ()
) -> LinearisedLaplace:
    schedule = Schedule(optimizer="adam", epochs=1, batch_size=1, lr=1.0)  # unused: training is finished
    method = Laplace(structure="full", mode=where, hold=hold)
    made = method.fit(task, [network], FitContext(seed=0, hyper=rule, schedule=schedule))
    assert isinstance(made, LinearisedLaplace)
    return made


def densities(problem: Problem, posterior: LinearisedLaplace) -> Tensor:
    """Log densities of the test targets in their own units, [N]."""
    task = problem.task
    assert isinstance(posterior.likelihood, Gaussian)
    moments, y = posterior.moments(task.test.inputs), task.test.targets
    assert y is not None
    noise = torch.diag((2 * posterior.likelihood.log_noise).exp())
    return gaussian_log_prob(y, moments.mean, moments.covariance + noise) - task.target_scale.log().sum()


def test_logliks(problem: Problem, posterior: LinearisedLaplace) -> tuple[float, float]:
    """Mean log densities of the test targets: among the data, and in the gap."""
    values = densities(problem, posterior)
    return float(values[~problem.in_gap].mean()), float(values[problem.in_gap].mean())


def choices_of(problem: Problem) -> list[Choice]:
    """Both families, with the biases in the basis and held at MAP, at w* and v*.

    The search over groups starts at the selected single precision, because the evidence of several has many maxima.
    """
    task, network = problem.task, problem.network
    found = []
    for (biases, hold), where in product(HELD.items(), PLACES):
        one = fitted(task, network, where, Evidence(), hold)
        begun = replace(network, prior_precision=dict.fromkeys(network.parameters, one.report.facts["prior_precision"]))
        several = fitted(task, begun, where, Evidence(family="groupwise"), hold)
        for family, made in (("isotropic", one), ("groupwise", several)):
            report = made.report.facts
            selected = set((report.get("prior_precisions") or {"": report["prior_precision"]}).values())
            size, evidence, status = report["weights_in_basis"], report["evidence_nats"], report["hyper_status"]
            numbers = (
                size,
                len(selected),
                min(selected),
                max(selected),
                evidence,
                status,
                *test_logliks(problem, made),
            )
            found.append(Choice(problem.data, biases, family, PLACES[where], *numbers))
    return found


def row(problem: Problem, precision: float, of: str = "") -> Row:
    at_w, at_v = (fitted(problem.task, problem.network, where, Fixed(precision)) for where in PLACES)
    w, v = at_w.report.facts, at_v.report.facts
    assert v["tangent_settled"]
    evidences = w["evidence_nats"], v["evidence_nats"], w["newton_decrement_nats"]
    return Row(problem.data, precision, of, *evidences, *test_logliks(problem, at_w))


def bands(ax: Axes, problem: Problem, shown: Row, grid: Tensor) -> None:
    """Mean and bands of two standard deviations, without and with noise, in the data's own units."""
    task, network = problem.task, problem.network
    posterior = fitted(task, network, "network", Fixed(shown.precision))
    moments = posterior.moments(grid)
    scale, shift = float(task.target_scale), float(task.target_mean)
    mean, deviation = scale * moments.mean[:, 0] + shift, scale * moments.covariance[:, 0, 0].sqrt()
    assert isinstance(network.likelihood, Gaussian)
    both = (deviation.square() + scale**2 * float((2 * network.likelihood.log_noise).exp())).sqrt()
    y, known = task.train.targets, task.test.targets
    assert y is not None and known is not None
    ax.scatter(task.train.inputs[:, 0], scale * y[:, 0] + shift, s=5, color=style.PALE, lw=0, alpha=0.6, label="data")
    held = task.test.inputs[problem.in_gap, 0], scale * known[problem.in_gap, 0] + shift
    ax.scatter(*held, s=5, color=style.INK, lw=0, alpha=0.6, label="left out")
    ax.plot(grid[:, 0], mean, color=TONE, lw=1.2, label="f(x, w*)")
    bands = ((deviation, 0.30, "±2 sd, function"), (both, 0.15, "±2 sd, new observation"))
    for width, alpha, label in bands:
        ax.fill_between(grid[:, 0], mean - 2 * width, mean + 2 * width, color=TONE, alpha=alpha, lw=0, label=label)
    middle, reach = float(y.mean()) * scale + shift, 4.5 * scale
    ax.set_ylim(middle - reach, middle + reach)
    style.panel_title(
        ax,
        f"precision {shown.precision:.4g}{f', {shown.of}' if shown.of else ''}\n"
        f"test score {shown.test_loglik:.3f}, in the gap {shown.gap_loglik:.3f}",
    )


def curves(ax: Axes, curve: list[Row], choices: dict[Where, Row]) -> None:
    """Both evidences and their maxima; only the part near the maxima is shown."""
    for i, (where, name) in enumerate(PLACES.items()):
        values = [r.evidence_at_w if where == "network" else r.evidence_at_v for r in curve]
        ax.plot([r.precision for r in curve], values, color=TONES[i], lw=1.4, label=f"at {name}")
        best = choices[where]
        height = best.evidence_at_w if where == "network" else best.evidence_at_v
        label = f"largest at {name}: {best.precision:.3g}"
        ax.plot(best.precision, height, style.marker(i), color=TONES[i], ms=7, ls="", label=label)
    ax.set_xscale("log")
    top = choices["tangent"].evidence_at_v
    ax.set_ylim(min(choices["network"].evidence_at_w, top - 100) - 100, top + 20)
    ax.set_xlabel("prior precision")
    ax.set_ylabel("log evidence (nats)")
    ax.legend(fontsize=7, loc="upper right")
    style.panel_title(ax, "log evidence by precision")


def logliks(ax: Axes, curve: list[Row], choices: dict[Where, Row]) -> None:
    """Both test log-likelihoods by precision, and the selected precisions."""
    for i, (values, name) in enumerate(
        [([r.test_loglik for r in curve], "among the data"), ([r.gap_loglik for r in curve], "in the gap")]
    ):
        ax.plot([r.precision for r in curve], values, color=(style.PALE, style.INK)[i], lw=1.4, label=name)
    for i, (where, name) in enumerate(PLACES.items()):
        ax.axvline(choices[where].precision, color=TONES[i], lw=1, ls=":", label=f"largest evidence at {name}")
    ax.set_xscale("log")
    best = max(r.gap_loglik for r in curve)
    ax.set_ylim(min(choices[w].gap_loglik for w in PLACES) - 1, max(best, *(r.test_loglik for r in curve)) + 0.2)
    ax.set_xlabel("prior precision")
    ax.set_ylabel("nats per point")
    ax.legend(fontsize=7, loc="center left")
    style.panel_title(ax, "test log-likelihood by precision")


def table(rows: list[Row]) -> str:
    """Markdown."""
    lines = [
        "| data | prior precision | | log evidence at w* | at v* | Newton decrement | test log-likelihood "
        "| in the gap |",
        "|---|--:|---|--:|--:|--:|--:|--:|",
    ]
    for r in rows:
        lines.append(
            f"| {r.data} | {r.precision:.4g} | {r.of} | {r.evidence_at_w:.2f} | {r.evidence_at_v:.2f} "
            f"| {r.newton_decrement:.3g} | {r.test_loglik:.3f} | {r.gap_loglik:.3f} |"
        )
    return "\n".join(lines) + "\n"


def choices_table(choices: list[Choice]) -> str:
    """Markdown."""
    lines = [
        "| data | biases | precisions | at | weights | selected | log evidence | search | test log-likelihood "
        "| in the gap |",
        "|---|---|---|---|--:|--:|--:|---|--:|--:|",
    ]
    for c in choices:
        several = c.groups > 1
        chosen = f"{c.groups}, {c.lowest_precision:.3g} to {c.highest_precision:.3g}" if several else ""
        lines.append(
            f"| {c.data} | {c.biases} | {c.family} | {c.at} | {c.weights_in_basis} "
            f"| {chosen or f'{c.lowest_precision:.3g}'} | {c.log_evidence:.2f} | {c.status} | {c.test_loglik:.3f} "
            f"| {c.gap_loglik:.3f} |"
        )
    return "\n".join(lines) + "\n"


def said(rows: list[Row], choices: list[Choice]) -> str:
    """What the tables show, from their numbers."""
    lines = []
    for data in dict.fromkeys(r.data for r in rows):
        mine = [r for r in rows if r.data == data]
        by_place = {r.of: r for r in mine if r.of}
        w, v = (by_place[chosen_at(place)] for place in PLACES.values())
        best = max(mine, key=lambda r: r.gap_loglik)
        higher = sum(r.evidence_at_v > r.evidence_at_w for r in mine)
        lines.append(
            f"{data}: the evidence is higher at v* than at w* at {higher} of {len(mine)} precisions, and largest at "
            f"{w.precision:.3g} (w*) and {v.precision:.3g} (v*). In the gap the test log-likelihood is "
            f"{w.gap_loglik:.3f} and {v.gap_loglik:.3f} with these; the highest in the table is "
            f"{best.gap_loglik:.3f}, at {best.precision:.3g}."
        )
        gains = []
        for place in PLACES.values():
            one, several = (
                next(c for c in choices if (c.data, c.biases, c.family, c.at) == (data, "in the basis", family, place))
                for family in ("isotropic", "groupwise")
            )
            gains.append(f"{several.log_evidence - one.log_evidence:.1f} nats at {place}")
        lines.append(f"One precision per group instead of one for all gains {' and '.join(gains)}.")
    lines.append(
        "`at bound`: the evidence does not depend on some group, which is held at a precision from where on nothing "
        "changes; a bias before a normalisation has no effect at all. One seed."
    )
    return "\n".join(lines) + "\n"


def chosen_at(place: str) -> str:
    return f"largest evidence at {place}"


def without_middle(data: str, folder: Path) -> tuple[Path, float, float]:
    """The data set as arrays, with the middle fifth of all points by input moved to the test set; and its ends."""
    experiment = load_experiment([f"data={data}", "method=map"])
    task = experiment.data.load(experiment.settings.data_path, 0)
    assert task.input_mean is not None and task.input_scale is not None
    parts = {}
    for name in ("train", "val", "test"):
        inputs, targets = getattr(task, name).inputs, getattr(task, name).targets
        assert targets is not None
        x = (task.input_mean + task.input_scale * inputs)[:, 0].double()
        parts[name] = torch.stack([x, (task.target_mean + task.target_scale * targets)[:, 0].double()], 1)
    every = torch.cat(list(parts.values()))
    low, high = every[:, 0].quantile(torch.tensor([0.4, 0.6], dtype=torch.float64)).tolist()
    known, test = torch.cat([parts["train"], parts["val"]]), parts["test"]
    inside = (known[:, 0] > low) & (known[:, 0] < high)
    kept = torch.cat([test, known[inside]])
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{data}_without_middle.npz"
    x, y = known[~inside].T.numpy()
    np.savez(path, x_train=x[:, None], y_train=y, x_test=kept[:, :1].numpy(), y_test=kept[:, 1].numpy())
    return path, low, high


def trained(data: str, work: Path, seed: int = 0) -> Problem:
    """The network of a run, in float64 on the CPU."""
    path, low, high = without_middle(data, work.resolve() / "arrays")
    words = ["data=arrays", f"data.path={path}", "model=mlp_batchnorm", "model.hidden=[50,50]", "method=map"]
    words += ["schedule=adam", "schedule.epochs=500", "schedule.batch_size=128", "schedule.lr=0.01"]
    run = bnn_runner.run([*words, f"seed={seed}", f"output_dir={work.resolve()}", "metric=[marginal]"])
    found = run.network
    assert isinstance(found.likelihood, Gaussian)
    network = replace(
        found,
        parameters={n: p.double() for n, p in found.parameters.items()},
        buffers={n: b.double() if b.is_floating_point() else b for n, b in found.buffers.items()},
        likelihood=Gaussian(found.likelihood.log_noise.double()),
    )
    task = run.task.to(torch.device("cpu"), torch.float64)
    assert task.input_mean is not None and task.input_scale is not None
    x = (task.input_mean + task.input_scale * task.test.inputs)[:, 0]
    return Problem(data, task, network, (x > low) & (x < high))


def panels(problem: Problem, path: Path) -> list[Row]:
    """Draw the nine panels; returns the rows of the five precisions and of the two selected ones."""
    task, network = problem.task, problem.network
    chosen = {where: fitted(task, network, where, Evidence()).report.facts["prior_precision"] for where in PLACES}
    choices = {where: row(problem, p, chosen_at(PLACES[where])) for where, p in chosen.items()}
    rows = sorted([*(row(problem, p) for p in PRECISIONS), *choices.values()], key=lambda r: r.precision)
    x = task.train.inputs[:, 0]
    span = float(x.max() - x.min())
    grid = torch.linspace(float(x.min()) - 0.3 * span, float(x.max()) + 0.3 * span, 300, dtype=torch.float64)[:, None]
    figure, axes = style.new_figure(3, 3, width=3.3, height=2.9)
    for ax, shown in zip(axes, rows, strict=False):
        bands(ax, problem, shown, grid)
    curve = [row(problem, p) for p in CURVE]
    curves(axes[-2], curve, choices)
    logliks(axes[-1], curve, choices)
    style.legend_below(figure, *axes[0].get_legend_handles_labels())
    style.title(figure, f"Batchnorm MLP 1-50-50-1 on {problem.data}: linearised Laplace, full curvature")
    style.save(figure, path)
    return rows


def write_csv(path: Path, kind: type[Row] | type[Choice], rows: Sequence[Row | Choice]) -> None:
    write_text(path, table_text([asdict(r) for r in rows], [f.name for f in fields(kind)]))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", default="matern_1d,my_1d", help="one-dimensional regression sets")
    parser.add_argument("--out", type=Path, default=Path("outputs/results"))
    parser.add_argument("--work", type=Path, default=Path("outputs"), help="folder of the training run")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    arguments.out.mkdir(parents=True, exist_ok=True)
    rows: list[Row] = []
    choices: list[Choice] = []
    for data in arguments.data.split(","):
        problem = trained(data, arguments.work)
        rows += panels(problem, arguments.out / f"normalised_evidence_{data}.png")
        choices += choices_of(problem)
    families = f"The largest evidence of each family of precisions:\n\n{choices_table(choices)}"
    text = f"{table(rows)}\n{families}\n{said(rows, choices)}"
    print(text)
    write_text(arguments.out / "normalised_evidence.md", text)
    write_csv(arguments.out / "normalised_evidence.csv", Row, rows)
    write_csv(arguments.out / "normalised_evidence_choices.csv", Choice, choices)
    return 0


if __name__ == "__main__":
    sys.exit(main())
