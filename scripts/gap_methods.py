"""Which approximation is closest to HMC where there are no data? Distances of all methods on a 1-D task with a gap.

    python scripts/gap_methods.py                              all methods (three minutes on 2 cores)
    python scripts/gap_methods.py --only laplace --only bbb    some methods (and HMC)
    python scripts/gap_methods.py seed=1                       further words are passed to bnn-run
    python scripts/gap_methods.py --jobs 2                     two methods at a time, on one thread each

Every method has the network, the Gaussian prior and the noise of conf/experiment/gap_methods.yaml, so HMC samples the
posterior that the others approximate. (Dropout and ensembles have no posterior under that prior, but are compared too.)
At each point, the predictive distribution p(y | x) of a new observation is compared with HMC's, by the 1-Wasserstein
distance ∫ |F − G| dy, in units of the target, and the total variation ½ ∫ |f − g| dy, both on a grid of y. They are
averaged over all points, and separately among the data, in the gap, and beyond the data.

The row "hmc, first half and second half" compares the two halves of HMC's chains. Smaller distances mean nothing.
R-hat is the largest over all these points. Chains above 1.1 have not mixed, and their row says so.

Finished cells are not run again. Writes gap_methods.{csv,md,png} to --results.
"""

from __future__ import annotations

import argparse
import math
import multiprocessing
import sys
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, fields
from pathlib import Path

import torch
from torch import Tensor

import bnn_runner
from bnn_runner.mcmc.diagnostics import effective_draws, rhat
from bnn_runner.mcmc.posterior import ChainDraws, ChainPosterior
from bnn_runner.mcmc.summary import RHAT_LIMIT
from bnn_runner.report import style
from bnn_runner.runs.cell import table_text
from bnn_runner.runtime.files import write_text
from bnn_runner.tasks import Task

RESULTS = Path(__file__).resolve().parents[1] / "outputs" / "results"
REFERENCE = "hmc"
REGIONS = {"test": "data", "ood/gap": "gap", "ood/far": "far"}
POINTS = 20  # of each region
GRID = 150  # values of y
CHAINS = ["method.start=members", "method.chains=4", "method.length=4"]  # of 2,000 epochs, one step each
METHODS: Mapping[str, Sequence[str]] = {
    REFERENCE: ["method.chains=8", "method.warmup=100", "method.draws=125", "method.max_leapfrogs=200"],
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
    "bbb": ["method.noise=kept", "method.epochs=3000", "method.lr=0.005"],
    "sgld": CHAINS,
    "psgld": CHAINS,
    "csgld": CHAINS,
    "sghmc": [*CHAINS, "method.friction=0.02"],
    "csghmc": [*CHAINS, "method.friction=0.02"],
}


@dataclass(frozen=True)
class Mixture:
    """Predictive mixtures of Gaussians at N points: weights [S], means [S, N], standard deviations [S or 1, N or 1]."""

    weights: Tensor
    means: Tensor
    sds: Tensor

    def moments(self) -> tuple[Tensor, Tensor]:
        """Mean and standard deviation of y at every point, [N]."""
        w = self.weights[:, None]
        mean = (w * self.means).sum(0)
        variance = (w * (self.sds.square() + (self.means - mean).square())).sum(0)
        return mean, variance.sqrt()

    def on(self, y: Tensor) -> tuple[Tensor, Tensor]:
        """CDF and density [N, G] at values y [N, G]."""
        cdf, density = torch.zeros_like(y), torch.zeros_like(y)
        sds = self.sds.expand(self.means.shape)
        for w, mean, sd in zip(self.weights, self.means, sds, strict=True):
            z = (y - mean[:, None]) / sd[:, None]
            cdf.add_(torch.special.ndtr(z), alpha=float(w))
            density.addcdiv_(torch.exp(-0.5 * z.square()), sd[:, None], value=float(w) / math.sqrt(2 * math.pi))
        return cdf, density


def distances(a: Mixture, b: Mixture) -> tuple[Tensor, Tensor]:
    """1-Wasserstein distance and total variation [N] of two predictive mixtures, by trapezoids on a grid of y."""
    low = torch.minimum(*((m.means - 6 * m.sds).min(0).values for m in (a, b)))
    high = torch.maximum(*((m.means + 6 * m.sds).max(0).values for m in (a, b)))
    y = low[:, None] + (high - low)[:, None] * torch.linspace(0, 1, GRID, dtype=torch.float64)
    (cdf_a, density_a), (cdf_b, density_b) = a.on(y), b.on(y)
    wasserstein = torch.trapezoid((cdf_a - cdf_b).abs(), y, dim=1)
    return wasserstein, 0.5 * torch.trapezoid((density_a - density_b).abs(), y, dim=1)


@dataclass(frozen=True)
class Places:
    """The points at which distributions are compared: some of each split, and all of them sorted by input."""

    chosen: Mapping[str, Tensor]
    inputs: Tensor  # [N, 1] as the network takes them
    x: Tensor  # [N] in original units
    region: Sequence[str]

    @staticmethod
    def of(task: Task) -> Places:
        chosen, inputs, region = {}, [], []
        for name, said in REGIONS.items():
            split = task.splits()[name]
            chosen[name] = torch.linspace(0, len(split) - 1, min(POINTS, len(split))).round().long()
            inputs.append(split.gather(chosen[name])[0])
            region += [said] * len(chosen[name])
        every = torch.cat(inputs)
        assert task.input_mean is not None and task.input_scale is not None
        x = (task.input_mean + task.input_scale * every)[:, 0].double()
        return Places(chosen, every, x, region)

    def mixture(self, run: bnn_runner.Run) -> Mixture:
        """What a run predicts at these points."""
        found = run.evaluation
        splits = [(found.splits[name], chosen) for name, chosen in self.chosen.items()]
        means = torch.cat([s.means[:, i, 0] for s, i in splits if s.means is not None], 1)
        sds = torch.cat(
            [
                s.variances[..., 0].expand(len(s.variances), len(s.ids))[:, i]
                for s, i in splits
                if s.variances is not None
            ],
            1,
        ).sqrt()
        weights = torch.softmax(found.log_weights.double(), 0)
        if len(weights) != len(means):
            weights = torch.full((len(means),), 1 / len(means), dtype=torch.float64)
        return Mixture(weights, means, sds)


def chain_outputs(run: bnn_runner.Run, inputs: Tensor) -> Tensor:
    """Network outputs [L, M, N] of every chain's draws, in order."""
    posterior = run.posterior
    assert isinstance(posterior, ChainPosterior)
    lanes, per_chain, _ = posterior.weights.shape
    buffers = {name: b.repeat_interleave(per_chain, 0) for name, b in posterior.buffers.items()}
    draws = ChainDraws(
        posterior.module, posterior.layout, posterior.weights.flatten(0, 1), buffers,
        posterior.log_weights.repeat(lanes), posterior.likelihood,
    )  # fmt: skip
    return draws(inputs)[..., 0].unflatten(0, (lanes, per_chain)).double()


def halves(run: bnn_runner.Run, places: Places, sds: Tensor) -> tuple[Mixture, Mixture]:
    """The predictive distributions of the first half and the second half of the chains."""
    scale, shift = run.task.target_scale.double(), run.task.target_mean.double()
    means = shift + scale * chain_outputs(run, places.inputs)
    half = len(means) // 2
    parts = [m.flatten(0, 1) for m in (means[:half], means[half:])]
    first, second = (Mixture(torch.full((len(m),), 1 / len(m), dtype=torch.float64), m, sds[:1]) for m in parts)
    return first, second


@dataclass(frozen=True)
class Row:
    """Distances between one method's predictive distribution and HMC's; `sd_ratio_gap`: ratio of sd of y in the gap."""

    method: str
    w1: float
    w1_data: float
    w1_gap: float
    w1_far: float
    tv: float
    tv_gap: float
    sd_ratio_gap: float
    loglik_test: float
    rhat: float | None
    ess: float | None
    settings: str
    note: str


def row(name: str, run: bnn_runner.Run, mixture: Mixture, reference: Mixture, places: Places, words: str) -> Row:
    wasserstein, variation = distances(mixture, reference)

    def mean(values: Tensor, region: str) -> float:
        return float(values[torch.tensor([r == region for r in places.region])].mean())

    mixing = effective = None
    notes = []
    if isinstance(run.posterior, ChainPosterior):
        outputs = chain_outputs(run, places.inputs)
        mixing, effective = float(rhat(outputs).max()), float(effective_draws(outputs).min())
        if not mixing <= RHAT_LIMIT:
            notes.append("chains have not mixed")
    if run.facts["report"].get("divergences"):
        notes.append(f"{run.facts['report']['divergences']} divergences")
    scores = run.scores
    loglik = scores[(scores.metric == "marginal_loglik") & (scores.split == "test")].value.iloc[0]
    return Row(
        method=name,
        w1=float(wasserstein.mean()),
        w1_data=mean(wasserstein, "data"),
        w1_gap=mean(wasserstein, "gap"),
        w1_far=mean(wasserstein, "far"),
        tv=float(variation.mean()),
        tv_gap=mean(variation, "gap"),
        sd_ratio_gap=mean(mixture.moments()[1] / reference.moments()[1], "gap"),
        loglik_test=float(loglik),
        rhat=mixing,
        ess=effective,
        settings=words,
        note="; ".join(notes),
    )


def markdown(rows: Sequence[Row], data: str) -> str:
    """The table, sorted by distance."""
    lines = [
        f"Distance of each method's predictive distribution to HMC's: {data}.",
        "",
        "| method | W1, all points | among the data | in the gap | beyond | TV, all | TV, gap | sd / HMC's, gap "
        "| log-lik. (test) | R-hat | ESS | settings | note |",
        "|---|--:|--:|--:|--:|--:|--:|--:|--:|--:|--:|---|---|",
    ]
    for r in rows:
        mixing = ["", ""] if r.rhat is None or r.ess is None else [f"{r.rhat:.2f}", f"{r.ess:.0f}"]
        numbers = [r.w1, r.w1_data, r.w1_gap, r.w1_far, r.tv, r.tv_gap, r.sd_ratio_gap, r.loglik_test]
        cells = [r.method, *(f"{v:.3f}" for v in numbers), *mixing, r.settings, r.note]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def draw(
    rows: Sequence[Row], mixtures: Mapping[str, Mixture], places: Places, train: tuple[Tensor, Tensor], path: Path
) -> None:
    """One panel per method: its mean ± 2 sd over HMC's band, sorted by distance."""
    order = places.x.argsort()
    x = places.x[order]
    centre, spread = (v[order] for v in mixtures[REFERENCE].moments())
    shown = [r for r in rows if r.method in mixtures]
    columns = 4
    figure, axes = style.new_figure(rows=math.ceil(len(shown) / columns), columns=columns, width=3.4, height=2.5)
    for ax, r in zip(axes, shown, strict=False):
        mean, sd = (v[order] for v in mixtures[r.method].moments())
        ax.fill_between(
            x, centre - 2 * spread, centre + 2 * spread, color="#B8B8B8", alpha=0.6, lw=0, label="HMC ±2 sd"
        )
        ax.plot(x, mean, color=style.BLUE, lw=1.6, label="mean")
        for side in (-2, 2):
            ax.plot(x, mean + side * sd, color=style.BLUE, lw=1.0, ls="--", label="±2 sd" if side > 0 else None)
        ax.plot(*train, color=style.VERMILION, ls="", marker="o", markersize=2.5, label="training points")
        reach = float((centre + 3 * spread).max()), float((centre - 3 * spread).min())
        ax.set_ylim(min(reach) - 0.5, max(reach) + 0.5)
        distance = "reference" if r.method == REFERENCE else f"W1 {r.w1:.3f}, in the gap {r.w1_gap:.3f}"
        style.panel_title(ax, f"{r.method}: {distance}")
    for spare in axes[len(shown) :]:
        spare.set_axis_off()
    style.title(figure, "Predictive distribution of a new observation: each method, and HMC (grey)")
    style.legend_below(figure, *axes[0].get_legend_handles_labels())
    style.save(figure, path)


def run_at_once(jobs: int, cells: Sequence[Sequence[str]]) -> None:
    """Run these commands, `jobs` at a time with one thread each; later calls read the finished cells."""
    spawned = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(jobs, mp_context=spawned, max_tasks_per_child=1) as pool:
        for words, _ in zip(cells, pool.map(_run_quietly, cells), strict=True):
            print(f"ran {' '.join(words)}", flush=True)


def _run_quietly(words: Sequence[str]) -> None:
    bnn_runner.run(words, quiet=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("words", nargs="*", help="overrides for bnn-run")
    parser.add_argument("--only", action="append", choices=tuple(METHODS), help="methods to compare with HMC")
    parser.add_argument("--output", type=Path, default=Path("outputs/gap_methods"), help="folder of the cells")
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--jobs", type=int, default=1, help="methods at a time")
    arguments = parser.parse_intermixed_args()
    names = [n for n in METHODS if n == REFERENCE or not arguments.only or n in arguments.only]
    common = ["experiment=gap_methods", *arguments.words, f"output_dir={arguments.output.absolute()}"]
    if arguments.jobs > 1:
        common += ["threads=1"]
        run_at_once(arguments.jobs, [[*common, f"method={name}", *METHODS[name]] for name in names])
    runs, places, mixtures, rows = {}, None, {}, []
    for name in names:
        print(f"{name} ...", flush=True)
        runs[name] = run = bnn_runner.run([*common, f"method={name}", *METHODS[name]], quiet=True)
        places = places or Places.of(run.task)
        mixtures[name] = mixture = places.mixture(run)
        settings = " ".join(METHODS[name])
        rows.append(row(name, run, mixture, mixtures[REFERENCE], places, settings))
        print(f"  W1 {rows[-1].w1:.4f}, in the gap {rows[-1].w1_gap:.4f} {rows[-1].note}", flush=True)
    assert places is not None
    reference = runs[REFERENCE]
    first, second = halves(reference, places, mixtures[REFERENCE].sds)
    own = row("hmc, first half and second half", reference, first, second, places, "")
    rows = [rows[0], *sorted([own, *rows[1:]], key=lambda r: r.w1)]
    task = reference.task
    table = markdown(rows, f"{task.spec.name}, {len(task.train)} training points, seed {reference.seed}")
    print("\n" + table)
    if not rows[0].rhat or rows[0].rhat > RHAT_LIMIT:
        print("The chains of HMC have not mixed. Increase method.draws of hmc in METHODS.", file=sys.stderr)
        return 1
    write_text(arguments.results / "gap_methods.md", table)
    columns = [f.name for f in fields(Row)]
    write_text(arguments.results / "gap_methods.csv", table_text([vars(r) for r in rows], columns))
    inputs, targets = task.train.gather(torch.arange(len(task.train)))
    assert targets is not None and task.input_mean is not None and task.input_scale is not None
    x, y = task.input_mean + task.input_scale * inputs, task.target_mean + task.target_scale * targets
    draw(rows, mixtures, places, (x[:, 0], y[:, 0]), arguments.results / "gap_methods.png")
    return 0


if __name__ == "__main__":
    sys.exit(main())
