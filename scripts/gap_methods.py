"""Which approximation is closest to HMC where there are no data? Distances of all methods on a 1-D task with a gap.

    python scripts/gap_methods.py                              all methods, five seeds (ten minutes of one core)
    python scripts/gap_methods.py --only laplace --only bbb    some methods (and HMC)
    python scripts/gap_methods.py --seeds 2 prior.precision=2  further words are passed to bnn-run
    python scripts/gap_methods.py --jobs 2                     two runs at a time, on one thread each

Every method has the network, the Gaussian prior and the noise of conf/experiment/gap_methods.yaml, so HMC samples the
posterior that the others approximate. (Dropout and ensembles have no posterior under that prior, but are compared too.)
Each seed has its own data, networks and HMC. At each point, the predictive distribution p(y | x) of a new observation
is compared with HMC's, by the 1-Wasserstein distance ∫ |F − G| dy, in units of the target, and the total variation
½ ∫ |f − g| dy, both on a grid of y. They are averaged over points among the data, in the gap, and beyond the data. The
rows are sorted by the distance in the gap; errors are standard errors over seeds.

HMC's own error: the two halves of its chains differ by about twice the error of all its draws, so that half of their
distance is shown. R-hat is the largest over all these points and seeds. Methods whose chains have not mixed (R-hat
above 1.1 for some seed) have a table of their own.

Finished cells are not run again. Writes gap_methods.{csv,md,png} and gap_methods_distances.png to --results.
"""

from __future__ import annotations

import argparse
import math
import multiprocessing
import statistics
import sys
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, fields
from pathlib import Path

import torch
from gap_distances import Mixture, Places, chain_outputs, distances, halves  # next to this file
from torch import Tensor

import bnn_runner
from bnn_runner.mcmc.diagnostics import effective_draws, rhat
from bnn_runner.mcmc.posterior import ChainPosterior
from bnn_runner.mcmc.summary import RHAT_LIMIT
from bnn_runner.report import style
from bnn_runner.report.looks import look
from bnn_runner.report.separation import LEVEL
from bnn_runner.report.student import holm, two_sided
from bnn_runner.runs.cell import table_text
from bnn_runner.runtime.files import write_text
from bnn_runner.tasks import Task

RESULTS = Path(__file__).resolve().parents[1] / "outputs" / "results"
REFERENCE, OWN = "hmc", "hmc (its own error)"
CHAINS = ["method.start=members", "method.chains=4", "method.length=2"]  # of 1,000 epochs, five steps each
METHODS: Mapping[str, Sequence[str]] = {
    REFERENCE: ["method.chains=8", "method.warmup=75", "method.draws=80", "method.max_leapfrogs=200"],
    "map": [],
    "ensemble": [],
    "laplace": [],
    "laplace_kfac": [],
    "laplace_diag": [],
    "laplace_last_layer": [],
    "swag": [],
    "multi_swag": [],
    "mc_dropout": [],
    "concrete_dropout": [],
    "bbb": ["method.noise=kept", "method.epochs=1500", "method.lr=0.005"],
    "sgld": CHAINS,
    "psgld": CHAINS,
    "csgld": CHAINS,
    "sghmc": [*CHAINS, "method.friction=0.02"],
    "csghmc": [*CHAINS, "method.friction=0.02"],
}


@dataclass(frozen=True)
class Distance:
    """Distances between one run's predictive distribution and HMC's, and the run's scores.

    Attributes:
        method: of the run.
        seed: of the run and its data.
        gap: 1-Wasserstein distance, in target units, in the gap; `data`, `far` and `everywhere` elsewhere.
        tv_gap: total variation in the gap.
        sd_ratio_gap: standard deviation of y divided by HMC's, in the gap.
        loglik: mean test log-likelihood in nats.
        rhat: of chains, the largest over the points.
        ess: of chains, the smallest effective number of draws.
        note: divergences.
    """

    method: str
    seed: int
    gap: float
    data: float
    far: float
    everywhere: float
    tv_gap: float
    sd_ratio_gap: float
    loglik: float
    rhat: float | None
    ess: float | None
    note: str


MEASURES = {
    "gap": "W1 in the gap",
    "data": "among the data",
    "far": "beyond",
    "everywhere": "all points",
    "tv_gap": "TV in the gap",
    "sd_ratio_gap": "sd / HMC's, gap",
    "loglik": "log-lik. (test)",
}
"""Columns of the tables: means over seeds with standard errors."""


def distance(name: str, run: bnn_runner.Run, mixture: Mixture, reference: Mixture, places: Places) -> Distance:
    wasserstein, variation = distances(mixture, reference)

    def mean(values: Tensor, region: str) -> float:
        return float(values[torch.tensor([r == region for r in places.region])].mean())

    mixing = effective = None
    if isinstance(run.posterior, ChainPosterior):
        outputs = chain_outputs(run, places.inputs)
        mixing, effective = float(rhat(outputs).max()), float(effective_draws(outputs).min())
    divergences = run.facts["report"].get("divergences")
    scores = run.scores
    loglik = scores[(scores.metric == "marginal_loglik") & (scores.split == "test")].value.iloc[0]
    return Distance(
        method=name,
        seed=run.seed,
        gap=mean(wasserstein, "gap"),
        data=mean(wasserstein, "data"),
        far=mean(wasserstein, "far"),
        everywhere=float(wasserstein.mean()),
        tv_gap=mean(variation, "gap"),
        sd_ratio_gap=mean(mixture.moments()[1] / reference.moments()[1], "gap"),
        loglik=float(loglik),
        rhat=mixing,
        ess=effective,
        note=f"{divergences} divergences" if divergences else "",
    )


def own_error(run: bnn_runner.Run, reference: Mixture, places: Places) -> Distance:
    """Half the distance between the two halves of HMC's chains: about the error of all of its draws."""
    found = distance(OWN, run, *halves(run, places, reference.sds), places)
    halved = {name: getattr(found, name) / 2 for name in ("gap", "data", "far", "everywhere", "tv_gap")}
    return Distance(**{**vars(found), **halved, "rhat": None, "ess": None})


@dataclass(frozen=True)
class Summary:
    """One method over its seeds."""

    method: str
    found: Sequence[Distance]

    def values(self, measure: str) -> list[float]:
        return [getattr(d, measure) for d in self.found]

    def mean(self, measure: str) -> float:
        return statistics.mean(self.values(measure))

    def error(self, measure: str) -> float:
        """Standard error over seeds; NaN with one."""
        values = self.values(measure)
        return statistics.stdev(values) / math.sqrt(len(values)) if len(values) > 1 else math.nan

    def shown(self, measure: str) -> str:
        error = self.error(measure)
        return f"{self.mean(measure):.3f}" + ("" if math.isnan(error) else f" ± {error:.3f}")

    @property
    def mixing(self) -> float | None:
        """The largest R-hat over seeds, None for a method without chains."""
        return max((d.rhat for d in self.found if d.rhat is not None), default=None)

    @property
    def mixed(self) -> bool:
        return self.mixing is None or self.mixing <= RHAT_LIMIT


def summaries(found: Sequence[Distance]) -> list[Summary]:
    """One for each method, sorted by the distance in the gap; HMC is the reference and not among them."""
    by_method: dict[str, list[Distance]] = {}
    for d in found:
        by_method.setdefault(d.method, []).append(d)
    made = [Summary(name, ds) for name, ds in by_method.items() if name != REFERENCE]
    return sorted(made, key=lambda s: s.mean("gap"))


def table(rows: Sequence[Summary]) -> str:
    """Markdown."""
    lines = [
        "| method | n | " + " | ".join(MEASURES.values()) + " | R-hat | ESS | settings | note |",
        "|---|--:|" + "--:|" * (len(MEASURES) + 2) + "---|---|",
    ]
    for s in rows:
        draws = [d.ess for d in s.found if d.ess is not None]
        mixing = ["", ""] if s.mixing is None or not draws else [f"{s.mixing:.2f}", f"{min(draws):.0f}"]
        notes = "; ".join(f"seed {d.seed}: {d.note}" for d in s.found if d.note)
        cells = [s.method, str(len(s.found)), *map(s.shown, MEASURES), *mixing, " ".join(METHODS.get(s.method, []))]
        lines.append("| " + " | ".join([*cells, notes]) + " |")
    return "\n".join(lines) + "\n"


def page(found: Sequence[Distance], data: str) -> str:
    """Both tables and what they show."""
    rows = summaries(found)
    mixed, unmixed = [s for s in rows if s.mixed], [s for s in rows if not s.mixed]
    text = [f"Distance of each method's predictive distribution to HMC's: {data}.", "", table(mixed)]
    if unmixed:
        text += [f"Chains that have not mixed (R-hat above {RHAT_LIMIT:g} for some seed):", "", table(unmixed)]
    compared = [s for s in mixed if s.method != OWN]
    if len(compared) > 1 and len(compared[0].found) > 1:
        text += [paired(compared), ""]
    reference = Summary(REFERENCE, [d for d in found if d.method == REFERENCE])
    text += [f"HMC: R-hat at most {reference.mixing:.2f}, test log-likelihood {reference.shown('loglik')} nats."]
    return "\n".join(text) + "\n"


def paired(rows: Sequence[Summary]) -> str:
    """The closest method in the gap, and its paired differences to the others, over seeds."""
    best, *others = rows
    count = len(best.found)
    parts, p_values = [], []
    for s in others:
        differences = [b - a for a, b in zip(best.values("gap"), s.values("gap"), strict=True)]
        mean, error = statistics.mean(differences), statistics.stdev(differences) / math.sqrt(count)
        parts.append(f"{s.method} {mean:.3f} ± {error:.3f}")
        p_values.append(two_sided(mean / error, count - 1) if error > 0 else math.nan)
    starred = [part + " *" * there for part, there in zip(parts, holm(p_values, LEVEL), strict=True)]
    return (
        f"Closest in the gap: {best.method}. Paired differences of W1 in the gap, other method minus {best.method}, "
        f"with standard errors over {count} seeds: {', '.join(starred)}. *: differs from 0 at {LEVEL:.0%} (t test, "
        f"Holm's rule over the {len(others)} differences)."
    )


def draw_distances(rows: Sequence[Summary], path: Path) -> None:
    """W1 in the gap of every method with its standard error, and HMC's own error as a band."""
    figure, (ax,) = style.new_figure(width=6.4, height=1.2 + 0.26 * len(rows))
    [own] = [s for s in rows if s.method == OWN]
    ax.axvspan(0, own.mean("gap"), color=style.PALE, alpha=0.4, lw=0, label="HMC's own error")
    shown = [*(s for s in rows if s.mixed and s is not own), *(s for s in rows if not s.mixed)]
    for i, s in enumerate(shown):
        error = s.error("gap")
        ax.errorbar(
            [s.mean("gap")], [i], xerr=None if math.isnan(error) else [error], fmt=look(s.method).marker,
            color=look(s.method).colour, mfc=look(s.method).colour if s.mixed else "white", capsize=3,
        )  # fmt: skip
    ax.set_yticks(range(len(shown)), [s.method + ("" if s.mixed else " (not mixed)") for s in shown])
    ax.set_ylim(len(shown) - 0.5, -0.5)
    ax.set_xlim(left=0)
    ax.set_xlabel("1-Wasserstein distance to HMC in the gap [target units]")
    style.title(figure, "Distance to HMC where there are no data")
    style.legend_below(figure, *ax.get_legend_handles_labels())
    style.save(figure, path)


def draw(found: Sequence[Distance], mixtures: Mapping[str, Mixture], places: Places, task: Task, path: Path) -> None:
    """One panel per method for one seed: its mean ± 2 sd over HMC's band, sorted by the distance in the gap."""
    order = places.x.argsort()
    x = places.x[order]
    centre, spread = (v[order] for v in mixtures[REFERENCE].moments())
    inputs, targets = task.train.gather(torch.arange(len(task.train)))
    assert targets is not None and task.input_mean is not None and task.input_scale is not None
    points = task.input_mean + task.input_scale * inputs, task.target_mean + task.target_scale * targets
    shown = sorted((d for d in found if d.method in mixtures and d.seed == found[0].seed), key=lambda d: d.gap)
    figure, axes = style.new_panels(len(shown), width=3.3, height=2.5)
    reach = float((centre + 3 * spread).max()) + 0.5, float((centre - 3 * spread).min()) - 0.5
    for ax, d in zip(axes, shown, strict=False):
        mean, sd = (v[order] for v in mixtures[d.method].moments())
        tone = look(d.method).colour
        ax.fill_between(
            x, centre - 2 * spread, centre + 2 * spread, color=style.PALE, alpha=0.4, lw=0, label="HMC ±2 sd"
        )
        ax.plot(x, mean, color=tone, lw=1.6)
        for side in (-2, 2):
            ax.plot(x, mean + side * sd, color=tone, lw=1.0, ls="--")
        ax.plot(*(p[:, 0] for p in points), color=style.INK, ls="", marker="o", ms=2.5, label="training points")
        ax.set_ylim(min(reach), max(reach))
        ax.set_xlabel("input")
        ax.set_ylabel("target")
        unmixed = d.rhat is not None and d.rhat > RHAT_LIMIT
        told = "reference" if d.method == REFERENCE else f"W1 in the gap {d.gap:.3f}"
        style.panel_title(ax, f"{d.method}: {told}" + (",\nnot mixed" if unmixed else ""))
    style.title(
        figure,
        f"Predictive distribution of a new observation, seed {found[0].seed}: each method in its colour "
        "(mean, and ±2 sd dashed),\nand HMC (band)",
    )
    style.legend_below(figure, *axes[0].get_legend_handles_labels())
    style.save(figure, path)


def run_at_once(jobs: int, cells: Sequence[Sequence[str]]) -> None:
    """Run these commands, `jobs` at a time with one thread each; later calls read the finished cells."""
    spawned = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(jobs, mp_context=spawned) as pool:
        for words, _ in zip(cells, pool.map(_run_quietly, cells), strict=True):
            print(f"ran {' '.join(words)}", flush=True)


def _run_quietly(words: Sequence[str]) -> None:
    bnn_runner.run(words, quiet=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("words", nargs="*", help="overrides for bnn-run")
    parser.add_argument("--only", action="append", choices=tuple(METHODS), help="methods to compare with HMC")
    parser.add_argument("--seeds", type=int, default=5, help="number of seeds (5)")
    parser.add_argument("--output", type=Path, default=Path("outputs/gap_methods"), help="folder of the cells")
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--jobs", type=int, default=1, help="runs at a time")
    arguments = parser.parse_intermixed_args()
    names = [n for n in METHODS if n == REFERENCE or not arguments.only or n in arguments.only]
    common = ["experiment=gap_methods", *arguments.words, f"output_dir={arguments.output.absolute()}"]
    cells = {
        (seed, name): [*common, f"seed={seed}", f"method={name}", *METHODS[name]]
        for seed in range(arguments.seeds)
        for name in names
    }
    if arguments.jobs > 1:
        common += ["threads=1"]
        cells = {key: [*words, "threads=1"] for key, words in cells.items()}
        run_at_once(arguments.jobs, list(cells.values()))
    found: list[Distance] = []
    pictured: tuple[Mapping[str, Mixture], Places, Task] | None = None
    for seed in range(arguments.seeds):
        runs = {name: bnn_runner.run(cells[seed, name], quiet=True) for name in names}
        task = runs[REFERENCE].task
        places = Places.of(task)
        mixtures = {name: places.mixture(run) for name, run in runs.items()}
        found += [distance(n, run, mixtures[n], mixtures[REFERENCE], places) for n, run in runs.items()]
        found.append(own_error(runs[REFERENCE], mixtures[REFERENCE], places))
        print(f"seed {seed}: W1 in the gap " + ", ".join(f"{d.method} {d.gap:.3f}" for d in found[-len(names) :]))
        pictured = pictured or (mixtures, places, task)
    assert pictured is not None
    mixtures, places, task = pictured
    text = page(found, f"{task.spec.name}, {len(task.train)} training points, {arguments.seeds} seeds")
    print("\n" + text)
    unmixed = [d for d in found if d.method == REFERENCE and not (d.rhat and d.rhat <= RHAT_LIMIT)]
    if unmixed:
        where = ", ".join(str(d.seed) for d in unmixed)
        print(f"The chains of HMC have not mixed (seed {where}). Increase method.draws in METHODS.", file=sys.stderr)
        return 1
    write_text(arguments.results / "gap_methods.md", text)
    columns = [f.name for f in fields(Distance)]
    write_text(arguments.results / "gap_methods.csv", table_text([vars(d) for d in found], columns))
    draw(found, mixtures, places, task, arguments.results / "gap_methods.png")
    draw_distances(summaries(found), arguments.results / "gap_methods_distances.png")
    return 0


if __name__ == "__main__":
    sys.exit(main())
