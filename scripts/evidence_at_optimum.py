"""Whether precisions selected at v* predict better than those selected at w*, over several networks.

    python scripts/evidence_at_optimum.py [--seeds 10] [--data matern_1d,my_1d] [--out outputs/results] [--work outputs]

For each seed a batchnorm MLP is trained on data without the middle fifth of the points, as in normalised_evidence.py.
The evidence selects the prior precision at the trained weights w* and at the tangent model's optimum v*, once a single
one and once one per group of weights (each scale-invariant group, and the rest). The posteriors differ in nothing else,
and are compared by their test log-likelihood among the data and in the gap: paired differences over seeds and test
points, by a t test with Holm's rule over all comparisons of the table.

Writes evidence_at_optimum.md and .csv. Three minutes for ten seeds.
"""

from __future__ import annotations

import argparse
import math
import statistics
import sys
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path

import torch
from normalised_evidence import PLACES, Problem, densities, fitted, trained  # next to this file
from torch import Tensor

from bnn_runner.hyper.evidence import Evidence
from bnn_runner.report.differences import Difference
from bnn_runner.report.student import holm
from bnn_runner.runs.cell import table_text
from bnn_runner.runtime.files import write_text

LEVEL = 0.05
FAMILIES = ("isotropic", "groupwise")
PARTS = {"among the data": False, "in the gap": True}


@dataclass(frozen=True)
class Fitted:
    """One posterior: the log densities of its test points (nats, targets in their own units) and its precisions."""

    values: Tensor
    lowest: float
    highest: float
    status: str


@dataclass(frozen=True)
class Compared:
    """Mean test log-likelihoods (nats per point) over `n` seeds with the precisions of w* and of v*."""

    data: str
    family: str
    points: str
    n: int
    at_w: float
    at_v: float
    difference: float
    standard_error: float
    p_value: float


def fits(problem: Problem) -> dict[tuple[str, str], Fitted]:
    """By family and place. The search over groups starts at the selected single precision."""
    found = {}
    for where, place in PLACES.items():
        start = problem.network
        for family in FAMILIES:
            made = fitted(problem.task, start, where, Evidence(family=family))
            facts = made.report.facts
            selected = list((facts.get("prior_precisions") or {"": facts["prior_precision"]}).values())
            found[family, place] = Fitted(
                densities(problem, made), min(selected), max(selected), str(facts["hyper_status"])
            )
            start = replace(start, prior_precision=dict.fromkeys(start.parameters, selected[0]))
    return found


def compared(data: str, problems: list[Problem], found: list[dict[tuple[str, str], Fitted]]) -> list[Compared]:
    """The rows of one data set; all seeds share their test points."""
    rows = []
    for family in FAMILIES:
        for name, inside in PARTS.items():
            chosen = problems[0].in_gap if inside else ~problems[0].in_gap
            w, v = (torch.stack([f[family, place].values[chosen] for f in found]) for place in PLACES.values())
            apart = v - w  # [seeds, points]
            n, points = apart.shape
            over_seeds = float(apart.mean(1).std()) / math.sqrt(n) if n > 1 else math.nan
            over_points = float(apart.mean(0).std()) / math.sqrt(points)
            of = Difference(float(apart.mean()), n, over_seeds, over_points, shared=True)
            means = float(w.mean()), float(v.mean())
            rows.append(Compared(data, family, name, n, *means, of.mean, of.error, of.p_value))
    return rows


def table(rows: list[Compared]) -> str:
    """Markdown."""
    lines = [
        "| data | precisions | test points | n | at w* | at v* | v* − w* | p | |",
        "|---|---|---|--:|--:|--:|--:|--:|---|",
    ]
    for r, different in zip(rows, holm([r.p_value for r in rows], LEVEL), strict=True):
        verdict = ("v* is better" if r.difference > 0 else "w* is better") if different else "undecided"
        lines.append(
            f"| {r.data} | {r.family} | {r.points} | {r.n} | {r.at_w:.4f} | {r.at_v:.4f} "
            f"| {r.difference:.4f} ± {r.standard_error:.2g} | {r.p_value:.2g} | {verdict} |"
        )
    return "\n".join(lines) + "\n"


def selected(data: str, found: list[dict[tuple[str, str], Fitted]]) -> str:
    """The single precisions, and how the searches ended."""
    parts = []
    for place in PLACES.values():
        values = sorted(f["isotropic", place].lowest for f in found)
        middle = statistics.median(values)
        parts.append(f"{middle:.3g} at {place} ({values[0]:.3g} to {values[-1]:.3g})")
    ends = sorted({f[key].status for f in found for key in f})
    return f"{data}: median of the selected single precision {', '.join(parts)}; searches ended: {', '.join(ends)}."


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=10)
    parser.add_argument("--data", default="matern_1d,my_1d", help="one-dimensional regression sets")
    parser.add_argument("--out", type=Path, default=Path("outputs/results"))
    parser.add_argument("--work", type=Path, default=Path("outputs"), help="folder of the training runs")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    rows, lines = [], []
    for data in arguments.data.split(","):
        problems = [trained(data, arguments.work, seed) for seed in range(arguments.seeds)]
        found = [fits(problem) for problem in problems]
        rows += compared(data, problems, found)
        lines.append(selected(data, found))
    legend = (
        "Test log-likelihoods in nats per point. Difference ± standard error over seeds and test points together; "
        f"verdicts at {LEVEL:.0%} by Holm's rule over the {len(rows)} comparisons of the table."
    )
    command = f"`python scripts/evidence_at_optimum.py --seeds {arguments.seeds}`, torch {torch.__version__}."
    text = "\n".join([table(rows), *lines, "", legend, "", command, ""])
    print(text)
    arguments.out.mkdir(parents=True, exist_ok=True)
    write_text(arguments.out / "evidence_at_optimum.md", text)
    write_text(
        arguments.out / "evidence_at_optimum.csv",
        table_text([asdict(r) for r in rows], [f.name for f in fields(Compared)]),
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
