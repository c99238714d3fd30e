"""The effect of the prior precision on the predictions of a batchnorm network, and the evidence of each precision.

    python scripts/normalised_evidence.py [--data matern_1d,my_1d] [--out outputs/results] [--work outputs]

Trains a batchnorm MLP with two hidden layers of 50 on one-dimensional data with a gap, and fits linearised Laplace with
the full curvature under five prior precisions: five panels. The sixth panel shows the log evidence at the trained
weights w* and at the tangent model's own optimum v* (Antorán et al. 2022) as a function of the precision, and the
precision that each selects. A second table has the largest evidence with a single precision and with one precision per
group of weights (each scale-invariant group, and the rest), with the biases in the basis and held at MAP.

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

import torch
from matplotlib.axes import Axes
from torch import Tensor

import bnn_runner
from bnn_runner.base import FitContext, HyperRule, Network
from bnn_runner.curvature.parameter_subset import HeldKind
from bnn_runner.evaluation.closed_form import gaussian_log_prob
from bnn_runner.hyper.evidence import Evidence
from bnn_runner.hyper.fixed import Fixed
from bnn_runner.laplace.posterior import LinearisedLaplace
from bnn_runner.methods.laplace import Laplace
from bnn_runner.models.likelihoods import Gaussian
from bnn_runner.report import style
from bnn_runner.runs.cell import table_text
from bnn_runner.runtime.files import write_text
from bnn_runner.tasks import Task
from bnn_runner.training.schedules import Schedule

PRECISIONS = (0.1, 1.0, 10.0, 100.0, 1000.0)
CURVE = torch.logspace(-2, 4, 37, dtype=torch.float64).tolist()
Where = Literal["network", "tangent"]
PLACES: dict[Where, str] = {"network": "w*", "tangent": "v*"}
SHOWS = """At v* the evidence is higher than at w*, and it selects a larger precision. One precision per group raises
the evidence most at w*, where training determines the norm of the weights of a scale-invariant group. `at bound` means
that the evidence does not depend on some group: it is held at a precision from where on nothing changes, as a bias
before a normalisation has no effect at all. No numbers were published for these figures; one seed.
"""
HELD: dict[str, tuple[HeldKind, ...]] = {"in the basis": (), "held at MAP": ("bias",)}


@dataclass(frozen=True)
class Row:
    """Log evidences in nats at one precision, and the closed-form test log-likelihood (nats per point)."""

    data: str
    precision: float
    of: str
    evidence_at_w: float
    evidence_at_v: float
    newton_decrement: float
    test_loglik: float


@dataclass(frozen=True)
class Choice:
    """The largest log evidence (nats) of a family of precisions, and its test log-likelihood (nats per point)."""

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


def fitted(
    task: Task, network: Network, where: Where, rule: HyperRule, hold: tuple[HeldKind, ...] = ()
) -> LinearisedLaplace:
    schedule = Schedule(optimizer="adam", epochs=1, batch_size=1, lr=1.0)  # unused: training is finished
    method = Laplace(structure="full", mode=where, hold=hold)
    made = method.fit(task, [network], FitContext(seed=0, hyper=rule, schedule=schedule))
    assert isinstance(made, LinearisedLaplace)
    return made


def test_loglik(task: Task, posterior: LinearisedLaplace) -> float:
    """Mean log density of the test targets in their own units."""
    assert isinstance(posterior.likelihood, Gaussian)
    moments, y = posterior.moments(task.test.inputs), task.test.targets
    assert y is not None
    noise = torch.diag((2 * posterior.likelihood.log_noise).exp())
    values = gaussian_log_prob(y, moments.mean, moments.covariance + noise)
    return float(values.mean() - task.target_scale.log().sum())


def choices_of(data: str, task: Task, network: Network) -> list[Choice]:
    """Both families, with the biases in the basis and held at MAP, at w* and v*.

    The search over groups starts at the selected single precision, because the evidence of several has many maxima.
    """
    found = []
    for (biases, hold), where in product(HELD.items(), PLACES):
        one = fitted(task, network, where, Evidence(), hold)
        begun = replace(network, prior_precision=dict.fromkeys(network.parameters, one.report.facts["prior_precision"]))
        several = fitted(task, begun, where, Evidence(family="groupwise"), hold)
        for family, made in (("isotropic", one), ("groupwise", several)):
            report = made.report.facts
            selected = set((report.get("prior_precisions") or {"": report["prior_precision"]}).values())
            size, evidence, status = report["weights_in_basis"], report["evidence_nats"], report["hyper_status"]
            numbers = (size, len(selected), min(selected), max(selected), evidence, status, test_loglik(task, made))
            found.append(Choice(data, biases, family, PLACES[where], *numbers))
    return found


def row(data: str, task: Task, network: Network, precision: float, of: str) -> Row:
    at_w, at_v = (fitted(task, network, where, Fixed(precision)) for where in PLACES)
    w, v = at_w.report.facts, at_v.report.facts
    assert v["tangent_settled"]
    loglik = test_loglik(task, at_w)
    return Row(data, precision, of, w["evidence_nats"], v["evidence_nats"], w["newton_decrement_nats"], loglik)


def bands(ax: Axes, task: Task, network: Network, shown: Row, grid: Tensor) -> None:
    """Mean and bands of two standard deviations, without and with noise, in the data's own units."""
    posterior = fitted(task, network, "network", Fixed(shown.precision))
    moments = posterior.moments(grid)
    scale, shift = float(task.target_scale), float(task.target_mean)
    mean, deviation = scale * moments.mean[:, 0] + shift, scale * moments.covariance[:, 0, 0].sqrt()
    assert isinstance(network.likelihood, Gaussian)
    both = (deviation.square() + scale**2 * float((2 * network.likelihood.log_noise).exp())).sqrt()
    y = task.train.targets
    assert y is not None
    ax.scatter(task.train.inputs[:, 0], scale * y[:, 0] + shift, s=5, color=style.GREY, lw=0, alpha=0.6, label="data")
    ax.plot(grid[:, 0], mean, color=style.BLUE, lw=1.2, label="f(x, w*)")
    for width, alpha in ((deviation, 0.30), (both, 0.15)):
        ax.fill_between(grid[:, 0], mean - 2 * width, mean + 2 * width, color=style.BLUE, alpha=alpha, lw=0)
    middle, reach = float(y.mean()) * scale + shift, 4.5 * scale
    ax.set_ylim(middle - reach, middle + reach)
    style.panel_title(
        ax,
        f"precision {shown.precision:g}: evidence {shown.evidence_at_w:.1f} at w*, {shown.evidence_at_v:.1f} at v*,\n"
        f"test log-likelihood {shown.test_loglik:.3f}",
    )


def curves(ax: Axes, curve: list[Row], choices: dict[Where, Row]) -> None:
    """Both evidences and their maxima; only the part near the maxima is shown."""
    for i, (where, name) in enumerate(PLACES.items()):
        values = [r.evidence_at_w if where == "network" else r.evidence_at_v for r in curve]
        ax.plot([r.precision for r in curve], values, color=style.colour(i), lw=1.4, label=f"at {name}")
        best = choices[where]
        height = best.evidence_at_w if where == "network" else best.evidence_at_v
        label = f"largest at {name}: {best.precision:.3g}"
        ax.plot(best.precision, height, style.marker(i), color=style.colour(i), ms=7, ls="", label=label)
    ax.set_xscale("log")
    top = choices["tangent"].evidence_at_v
    ax.set_ylim(min(choices["network"].evidence_at_w, top - 100) - 100, top + 20)
    ax.set_xlabel("prior precision")
    ax.set_ylabel("log evidence (nats)")
    ax.legend(fontsize=7, frameon=False)
    style.panel_title(ax, "log evidence by precision")


def table(rows: list[Row]) -> str:
    """Markdown."""
    lines = [
        "| data | prior precision | | log evidence at w* | at v* | Newton decrement | test log-likelihood |",
        "|---|--:|---|--:|--:|--:|--:|",
    ]
    for r in rows:
        lines.append(
            f"| {r.data} | {r.precision:.4g} | {r.of} | {r.evidence_at_w:.2f} | {r.evidence_at_v:.2f} "
            f"| {r.newton_decrement:.3g} | {r.test_loglik:.3f} |"
        )
    return "\n".join(lines) + "\n"


def choices_table(choices: list[Choice]) -> str:
    """Markdown."""
    lines = [
        "| data | biases | precisions | at | weights | selected | log evidence | search | test log-likelihood |",
        "|---|---|---|---|--:|--:|--:|---|--:|",
    ]
    for c in choices:
        several = c.groups > 1
        chosen = f"{c.groups}, {c.lowest_precision:.3g} to {c.highest_precision:.3g}" if several else ""
        lines.append(
            f"| {c.data} | {c.biases} | {c.family} | {c.at} | {c.weights_in_basis} "
            f"| {chosen or f'{c.lowest_precision:.3g}'} | {c.log_evidence:.2f} | {c.status} | {c.test_loglik:.3f} |"
        )
    return "\n".join(lines) + "\n"


def trained(data: str, work: Path) -> tuple[Task, Network]:
    """The network of a run, in float64 on the CPU."""
    words = [f"data={data}", "model=mlp_batchnorm", "model.hidden=[50,50]", "method=map"]
    words += ["schedule=adam", "schedule.epochs=500", "schedule.batch_size=128", "schedule.lr=0.01"]
    run = bnn_runner.run([*words, f"output_dir={work.resolve()}", "metric=[marginal]"])
    found = run.network
    assert isinstance(found.likelihood, Gaussian)
    network = replace(
        found,
        parameters={n: p.double() for n, p in found.parameters.items()},
        buffers={n: b.double() if b.is_floating_point() else b for n, b in found.buffers.items()},
        likelihood=Gaussian(found.likelihood.log_noise.double()),
    )
    return run.task.to(torch.device("cpu"), torch.float64), network


def panels(data: str, task: Task, network: Network, path: Path) -> list[Row]:
    """Draw the six panels; returns the rows of the five precisions and of the two selected ones."""
    chosen = {where: fitted(task, network, where, Evidence()).report.facts["prior_precision"] for where in PLACES}
    choices = {
        where: row(data, task, network, p, f"largest evidence at {PLACES[where]}") for where, p in chosen.items()
    }
    rows = [row(data, task, network, p, "") for p in PRECISIONS]
    x = task.train.inputs[:, 0]
    span = float(x.max() - x.min())
    grid = torch.linspace(float(x.min()) - 0.3 * span, float(x.max()) + 0.3 * span, 300, dtype=torch.float64)[:, None]
    figure, axes = style.new_figure(2, 3, width=4.2, height=3.2)
    for ax, shown in zip(axes, rows, strict=False):
        bands(ax, task, network, shown, grid)
    axes[0].legend(fontsize=7, frameon=False, loc="upper left")
    curves(axes[-1], [row(data, task, network, p, "") for p in CURVE], choices)
    style.title(figure, f"Batchnorm MLP 1-50-50-1 on {data}: linearised Laplace, full curvature")
    style.save(figure, path)
    return sorted([*rows, *choices.values()], key=lambda r: r.precision)


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
        task, network = trained(data, arguments.work)
        rows += panels(data, task, network, arguments.out / f"normalised_evidence_{data}.png")
        choices += choices_of(data, task, network)
    text = f"{table(rows)}\nThe largest evidence of each family of precisions:\n\n{choices_table(choices)}\n{SHOWS}"
    print(text)
    write_text(arguments.out / "normalised_evidence.md", text)
    write_csv(arguments.out / "normalised_evidence.csv", Row, rows)
    write_csv(arguments.out / "normalised_evidence_choices.csv", Choice, choices)
    return 0


if __name__ == "__main__":
    sys.exit(main())
