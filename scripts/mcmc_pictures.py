"""The samplers of method=sgld, sghmc and csgld on three published targets, compared with exact values.

    python scripts/mcmc_pictures.py [--out outputs/results] [--seed 0]      one minute

1. SGLD on the posterior of a two-component mixture (Welling & Teh 2011, §5.1), compared with the exact posterior on a
   grid. Its two modes depend on the 100 random points; DATA_SEED is the first seed with modes near the published ones.
2. SGHMC in a double well with noisy gradients (Chen et al. 2014, fig. 1), compared with quadrature; and without
   friction, which has a higher temperature.
3. SGLD and cyclical SGLD on 25 Gaussians (Zhang et al. 2020, §5.1): the number of modes that they find, and the share
   of draws within three standard deviations of a mode. The exploration steps of a cycle are left out.

Writes mcmc_targets.csv, mcmc_targets.md and one figure per target. Exit code 1 if a value is outside its range.
"""

from __future__ import annotations

import argparse
import csv
import itertools
import math
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import astuple, dataclass, fields, replace
from functools import partial
from pathlib import Path

import numpy as np
import torch
from matplotlib.colors import LinearSegmentedColormap
from torch import Tensor

from bnn_runner.mcmc.chains import ChainBatches, Chains, Dynamics, run_stochastic
from bnn_runner.mcmc.checkpoint import Checkpoint
from bnn_runner.mcmc.dynamics import ChainState, hamiltonian, langevin
from bnn_runner.mcmc.noise import ChainNoise
from bnn_runner.mcmc.steps import Cyclical, Polynomial, StepSizes, evenly_kept
from bnn_runner.report import style
from bnn_runner.report.looks import look
from bnn_runner.rng import derive_seed
from bnn_runner.tasks import Split

Gradient = Callable[[Tensor, int], Tensor]
DATA_SEED, PUBLISHED_MODES, NEAR = 17, ((0.0, 1.0), (1.0, -1.0)), 0.3
"""The first seed of 0, 1, … whose exact posterior has two modes, each at most `NEAR` from a published one, with a
density between them of at most half the lower mode's."""
CPU = torch.device("cpu")


@dataclass(frozen=True)
class Row:
    """One number and its exact value, if known; it holds if low <= value <= high, where these are given."""

    target: str
    sampler: str
    quantity: str
    value: float
    reference: float | None
    low: float | None = None
    high: float | None = None

    @property
    def holds(self) -> bool:
        return self.low is None or self.high is None or self.low <= self.value <= self.high


def sample(
    gradient: Gradient, dynamics: Dynamics, start: Tensor, steps: StepSizes, kept: Sequence[int], total: int, seed: int
) -> Chains:
    """The package's chains on a density that is given by its gradient."""
    seeds = [derive_seed(seed, "picture", i) for i in range(len(start))]
    zero = torch.zeros(len(start), dtype=start.dtype)
    return run_stochastic(
        lambda w, t: (zero, gradient(w, t)),
        dynamics,
        ChainState.at(start),
        steps,
        kept,
        total,
        1.0,
        seeds,
        Checkpoint(None, ""),
    )


# ------------------------------------------------------------------------- 1: the mixture of two


def mixture_data(seed: int) -> Tensor:
    """100 points from θ = (0, 1)."""
    random = np.random.default_rng(seed)
    second = random.random(100) >= 0.5
    return torch.from_numpy(random.standard_normal(100) * math.sqrt(2) + second)


def mixture_log_density(data: Tensor, one: Tensor, two: Tensor) -> Tensor:
    """Log posterior density on a grid, up to a constant."""
    log_density = -one.square() / 20 - two.square() / 2
    for x in data:
        log_density += torch.logaddexp(-(x - one).square() / 4, -(x - one - two).square() / 4)
    return log_density


def mixture_modes(log_density: Tensor, axes: Sequence[Tensor]) -> tuple[list[tuple[float, float]], float]:
    """The mode with θ₂ > 0 and the one with θ₂ < 0, and the density on the ridge between them, as a share of the lower.

    The ridge is the largest density at each θ₂.
    """
    ridge, along = log_density.max(0)
    above = axes[1] > 0
    places = [int(torch.where(part, ridge, -math.inf).argmax()) for part in (above, ~above)]
    modes = [(float(axes[0][along[j]]), float(axes[1][j])) for j in places]
    lowest = ridge[min(places) : max(places) + 1].min()
    return modes, float((lowest - min(ridge[j] for j in places)).exp())


def mixture(seed: int, folder: Path) -> list[Row]:
    """θ₁ ~ N(0, 10), θ₂ ~ N(0, 1), x ~ ½ N(θ₁, 2) + ½ N(θ₁ + θ₂, 2) (variances); 100 points from θ = (0, 1).

    Step sizes and batches of one point as published; 128 chains of 10⁵ steps each replace one chain of 10⁶.
    """
    data = mixture_data(DATA_SEED)
    batches = ChainBatches(
        Split(data[:, None], data[:, None], torch.arange(100)), [derive_seed(seed, "data", i) for i in range(128)], 1
    )

    def gradient(theta: Tensor, t: int) -> Tensor:
        x = batches.at(t)[0][:, 0, 0]
        first, both = x - theta[:, 0], x - theta[:, 0] - theta[:, 1]
        share = torch.sigmoid((first.square() - both.square()) / 4)
        by_both = share * both
        likelihood = torch.stack([(1 - share) * first + by_both, by_both], 1) * (100 / 2)
        return torch.addcmul(likelihood, theta, torch.tensor([-1 / 10, -1.0], dtype=theta.dtype))

    steps, total, burn_in = Polynomial(0.01, 0.0001, 0.55, 1_000_000), 100_000, 5_000
    kept = evenly_kept(steps, burn_in, total, 9_500)
    start = torch.zeros(128, 2, dtype=torch.float64)
    draws = sample(gradient, langevin, start, steps, kept, total, seed).weights
    weights = torch.softmax(torch.tensor([steps.log_weight(t) for t in kept]), 0).double()

    axes = [torch.linspace(-2.5, 3.5, 601).double(), torch.linspace(-4, 4, 801).double()]
    one, two = torch.meshgrid(*axes, indexing="ij")
    log_density = mixture_log_density(data, one, two)
    mass = torch.softmax(log_density.flatten(), 0).reshape(log_density.shape)

    def moments(values: Tensor, mass: Tensor) -> tuple[float, float]:
        mean = (mass * values).sum()
        return float(mean), float((mass * (values - mean).square()).sum().sqrt())

    spread = (weights / len(draws)).expand(len(draws), -1)
    modes, between = mixture_modes(log_density, axes)
    away = [math.dist(a, b) for a, b in zip(modes, PUBLISHED_MODES, strict=True)]
    rows = [
        Row("two-component mixture", "exact", f"distance of a mode from {b}", d, None, 0.0, NEAR)
        for d, b in zip(away, PUBLISHED_MODES, strict=True)
    ]
    rows.append(Row("two-component mixture", "exact", "density between / lower mode", between, None, 0.0, 0.5))
    for i, (name, grid) in enumerate([("theta1", one), ("theta2", two)]):
        exact, found = moments(grid, mass)[1], moments(draws[..., i], spread)[1]
        rows.append(Row("two-component mixture", "SGLD", f"sd {name}", found, exact, 0.95 * exact, 1.05 * exact))
    exact, found = float(mass[two > 0].sum()), float(spread[draws[..., 1] > 0].sum())
    rows.append(Row("two-component mixture", "SGLD", "P(theta2 > 0)", found, exact, exact - 0.05, exact + 0.05))

    figure, (left, right) = style.new_figure(columns=2, width=4.2, height=3.8)
    levels = torch.linspace(0.05, 0.95, 7) * float(mass.max())
    left.contour(*axes, mass.T, levels=levels.tolist(), colors=style.INK, linewidths=1)
    edges = [np.linspace(-1, 2, 90), np.linspace(-3, 3, 90)]
    shades = LinearSegmentedColormap.from_list("sgld", ["white", look("sgld").colour, "black"])
    counts, _, _ = np.histogram2d(
        draws[..., 0].flatten(), draws[..., 1].flatten(), bins=edges, weights=spread.flatten()
    )
    right.pcolormesh(*edges, counts.T, cmap=shades)
    for ax, title in ((left, "exact posterior"), (right, "SGLD, weighted by step size")):
        style.panel_title(ax, title)
        ax.set_xlim(-1, 2)
        ax.set_ylim(-3, 3)
        ax.set_xlabel("theta1")
        ax.set_ylabel("theta2")
    style.title(figure, "Posterior of a two-component mixture")
    style.save(figure, folder / "mcmc_mixture.png")
    return rows


# ---------------------------------------------------------------------------- 2: the double well


def double_well(seed: int, folder: Path) -> list[Row]:
    """π(x) ∝ exp(2x² − x⁴), gradient noise N(0, 4); Δt 0.1, friction C 3: η = Δt², α = CΔt. 80,000 draws."""
    lanes, total, every, dt, variance = 100, 40_000, 50, 0.1, 4.0
    noise = ChainNoise([derive_seed(seed, "well", i) for i in range(lanes)], "gradient", 1, torch.float64, CPU)

    def gradient(x: Tensor, t: int) -> Tensor:
        return 4 * x - 4 * x**3 + math.sqrt(variance) * noise.at(t)

    with_friction = partial(hamiltonian, friction=3 * dt, gradient_variance=variance)
    counter = itertools.count()

    def without_friction(state: ChainState, g: Tensor, step: float, temperature: float, z: Tensor) -> ChainState:
        """New momentum every 50 steps; nothing counteracts the noise of the gradient in between."""
        if next(counter) % every == 0:
            state = replace(state, momentum=math.sqrt(step) * z)
        return hamiltonian(state, g, step, temperature, z, friction=0.0)

    grid = torch.linspace(-3, 3, 6001).double()
    density = torch.exp(2 * grid.square() - grid**4)
    density /= density.sum()
    exact_square, exact_middle = float((density * grid.square()).sum()), float(density[grid.abs() < 0.5].sum())
    figure, (ax,) = style.new_figure(width=6, height=3.8)
    ax.plot(grid, density / (grid[1] - grid[0]), color=style.BLACK, ls="--", label="exact")
    steps = Polynomial(dt**2, dt**2, 0.55, total)
    rows = []
    for name, dynamics, colour in (
        ("SGHMC", with_friction, look("sghmc").colour),
        ("noisy HMC, no friction", without_friction, style.PALE),
    ):
        start = torch.zeros(lanes, 1, dtype=torch.float64)
        kept = range(every - 1, total, every)
        x = sample(gradient, dynamics, start, steps, kept, total, seed).weights[:, 20:].flatten()
        square, middle = float(x.square().mean()), float((x.abs() < 0.5).double().mean())
        if dynamics is with_friction:
            rows.append(
                Row("double well", name, "E x²", square, exact_square, exact_square - 0.015, exact_square + 0.015)
            )
            rows.append(
                Row(
                    "double well",
                    name,
                    "P(abs x < 0.5)",
                    middle,
                    exact_middle,
                    exact_middle - 0.015,
                    exact_middle + 0.015,
                )
            )
        else:
            rows.append(Row("double well", name, "E x² / exact", square / exact_square, None, 1.10, 1.22))
        ax.hist(x.numpy(), bins=np.linspace(-2.2, 2.2, 90), density=True, histtype="step", color=colour, label=name)
    ax.set_xlim(-2.2, 2.2)
    ax.set_xlabel("x")
    ax.set_ylabel("density")
    style.title(figure, "Double well, gradient noise of variance 4")
    style.legend_below(figure, *ax.get_legend_handles_labels())
    style.save(figure, folder / "mcmc_double_well.png")
    return rows


# ------------------------------------------------------------------------------ 3: 25 Gaussians


@dataclass(frozen=True)
class ConstantThenPolynomial:
    """ε = first for `constant` steps, then first · (t − constant + 1)^−γ: the plain SGLD of the comparison."""

    first: float
    constant: int
    gamma: float

    def at(self, t: int) -> float:
        return self.first * max(1, t - self.constant + 1) ** -self.gamma

    def samples(self, t: int) -> bool:
        return True

    def noisy(self, t: int) -> bool:
        return True

    def log_weight(self, t: int) -> float:
        return 0.0


def gaussians(seed: int, folder: Path) -> list[Row]:
    """Equal mixture of N(c, 0.03 I), c in {−4, −2, 0, 2, 4}²; gradient noise N(0, 1); 50,000 steps.

    A mode counts as found if at least 100 draws are within 0.25 of it. The paper states steps as α = ε/2. Five
    groups of four chains. Of cyclical SGLD the authors' code leaves out the first 50 steps of each cycle; at the large
    steps that follow, the chain is not stable in any mode. The rows of the second half of each cycle leave these out.
    """
    total, groups, size = 50_000, 5, 4
    side = torch.tensor([-4.0, -2.0, 0.0, 2.0, 4.0])
    centres = torch.cartesian_prod(side, side)
    lanes = groups * size
    noise = ChainNoise([derive_seed(seed, "modes", i) for i in range(lanes)], "gradient", 2, torch.float32, CPU)

    def gradient(x: Tensor, t: int) -> Tensor:
        towards = centres - x[:, None]
        share = torch.softmax(-towards.square().sum(-1) / 0.06, -1)
        return (share[:, None] @ towards)[:, 0] / 0.03 + noise.at(t)

    length = math.ceil(total / 30)
    cyclical = Cyclical(2 * 0.07, 30, total, explore=50 / length, explore_noise=True)
    start = torch.zeros(lanes, 2)
    rows, pictures = [], []
    exact = 1 - math.exp(-4.5)
    plain = ConstantThenPolynomial(2 * 0.043, 500, 0.55)
    parts: dict[str, tuple[StepSizes, float, tuple[int, int], tuple[int, int], float | None]] = {
        "SGLD": (plain, 0.0, (0, 3), (0, 12), 0.02),
        "cyclical SGLD": (cyclical, 50 / length, (15, 25), (25, 25), None),
        "cyclical SGLD, second half of each cycle": (cyclical, 0.5, (15, 25), (24, 25), 0.05),
    }
    drawn: dict[StepSizes, Tensor] = {}
    for name, (steps, explored, single, together, tolerance) in parts.items():
        kept = [t for t in range(total) if steps.samples(t)]
        if steps not in drawn:
            drawn[steps] = sample(gradient, langevin, start, steps, kept, total, seed).weights
        draws = drawn[steps]
        if steps is cyclical:
            draws = draws[:, torch.tensor([t % length >= explored * length for t in kept])]
        squares = torch.stack([(draws - c).square().sum(-1) for c in centres])  # [25, L, M]
        near = (squares < 0.25**2).sum(2).T
        alone = float((near >= 100).sum(1).double().mean())
        joint = float((near.reshape(groups, size, 25).sum(1) >= 100).sum(1).double().mean())
        rows.append(Row("25 Gaussians", name, "modes found by one chain", alone, 25, *single))
        rows.append(Row("25 Gaussians", name, "modes found by four chains", joint, 25, *together))
        within = float((squares.amin(0) < 9 * 0.03).double().mean())
        limits = (None, None) if tolerance is None else (exact - tolerance, exact + tolerance)
        rows.append(Row("25 Gaussians", name, "share of draws within 3 sd of a mode", within, exact, *limits))
        pictures.append((name, draws[0]))
    figure, panels = style.new_figure(columns=3, width=3.3, height=3.4)
    for ax, (name, draws) in zip(panels, pictures, strict=True):
        ax.scatter(*draws[::10].T, s=1, color=look("csgld" if "cyclical" in name else "sgld").colour, alpha=0.3, lw=0)
        ax.scatter(*centres.T, s=14, color=style.INK, marker="x", lw=1)
        style.panel_title(ax, f"{name}, one chain" if name == "SGLD" else name)
        ax.set_xlim(-5, 5)
        ax.set_ylim(-5, 5)
        ax.set_aspect("equal")
    style.title(figure, "25 Gaussians (crosses: their centres)")
    style.save(figure, folder / "mcmc_25_gaussians.png")
    return rows


# --------------------------------------------------------------------------------------- tables


def table(rows: Sequence[Row]) -> str:
    """Markdown."""
    lines = [
        "| target | sampler | quantity | value | exact | accepted | holds |",
        "|---|---|---|--:|--:|---|---|",
    ]
    for r in rows:
        accepted = "" if r.low is None or r.high is None else f"{r.low:.3g} to {r.high:.3g}"
        exact = "" if r.reference is None else f"{r.reference:.4g}"
        lines.append(
            f"| {r.target} | {r.sampler} | {r.quantity} | {r.value:.4g} | {exact} | {accepted} "
            f"| {('yes' if r.holds else 'NO') if accepted else ''} |"
        )
    return "\n".join(lines) + "\n"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("outputs/results"))
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    arguments.out.mkdir(parents=True, exist_ok=True)
    torch.set_num_threads(1)
    rows: list[Row] = []
    for make in (mixture, double_well, gaussians):
        start = time.perf_counter()
        rows += make(arguments.seed, arguments.out)
        print(f"{make.__name__}: {time.perf_counter() - start:.0f} s", file=sys.stderr)
    print(table(rows))
    (arguments.out / "mcmc_targets.md").write_text(table(rows), encoding="utf-8")
    with (arguments.out / "mcmc_targets.csv").open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow([*(f.name for f in fields(Row)), "holds"])
        writer.writerows([*astuple(r), r.holds] for r in rows)
    return 0 if all(r.holds for r in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
