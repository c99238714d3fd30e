"""How often a joint log-likelihood from draws is called converged although it is biased, where the answer is known.

Cases: regression with Gaussian functions of a given rank and Gaussian noise, with and without outliers in the data, in
blocks of tau different points and dyadic blocks of kappa anchors; and classes with Gaussian logits, whose answer is
that of 100,000 draws. The metrics of the runner score each case with independent sets of draws. Writes
outputs/results/joint_convergence.{csv,md}.

    python scripts/joint_convergence.py             450 cases of the grid, the named cases, classes (15 minutes)
    python scripts/joint_convergence.py --quick     20 cases, fewer sets of draws, nothing is written

The bias of a case is the mean over sets of the estimate less the known value of the same blocks. A set is *biased* if
the bias of its case is larger than the standard error that the set reports, and *unbiased* if it is at most half of it.
A *false ok* is a biased set with status ok, a *false alarm* an unbiased set with another status; the worst case is the
largest share of false ok among the sets of one case. *Outside* are the sets with status ok whose own estimate is more
than two reported standard errors from the known value.
"""

from __future__ import annotations

import argparse
import csv
import io
import math
import random
import statistics
import time
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, fields
from itertools import product
from pathlib import Path

import torch
from torch import Tensor

from bnn_runner.metrics.dyadic import Dyadic
from bnn_runner.metrics.joint import Joint
from bnn_runner.rng import generator
from bnn_runner.runtime.files import write_text
from bnn_runner.scoring import Evaluation, GaussianJoint, Score, SplitEvaluation

RESULTS = Path(__file__).resolve().parents[1] / "outputs" / "results"
POINTS, OUTLIERS, FAR, TOLERANCE = 200, 0.02, 4.0, 0.002
"""Test points; the share of them that are outliers, and how far these are (in 1 + noise); nats per label."""
RANKS, NOISES, DRAWS = (1, 2, 5, 10, 50), (0.1, 0.3, 1.0, 3.0), (50, 100, 300, 1000, 3000)
TAUS, KAPPAS = (1, 2, 10, 30, 100), (2, 3, 4, 5)
REFERENCE_DRAWS, NUM_CLASSES, SCALES = 100_000, 10, (0.5, 1.0, 2.0)
CASES, SETS = 450, 20


@dataclass(frozen=True)
class Case:
    """One problem. `size` is tau of "joint" blocks and kappa of "dyadic" ones; for classes `noise` scales logits."""

    kind: str
    blocks: str
    size: int
    rank: int
    noise: float
    draws: int
    outliers: bool = False
    group: str = "grid"


@dataclass(frozen=True)
class Outcome:
    """What the sets of draws of a case gave; biases and errors in nats per block, the rest are shares of sets."""

    group: str
    kind: str
    blocks: str
    size: int
    rank: int
    noise: float
    outliers: bool
    draws: int
    sets: int
    known: float
    bias: float
    standard_error: float
    effective_draws: float
    ok: float
    biased: float
    false_ok: float
    unbiased: float
    false_alarm: float
    outside: float


def metric(case: Case) -> Joint | Dyadic:
    if case.blocks == "joint":
        return Joint(taus=(case.size,), repeats=1, tolerance=TOLERANCE)
    return Dyadic(kappas=(case.size,), labels=10, repeats=1, variant="uniform", tolerance=TOLERANCE)


class GaussianFunctions:
    """f = root z at N points, z standard normal of `rank` numbers; y is one draw of it with noise."""

    def __init__(self, case: Case) -> None:
        stream = generator(0, "joint convergence", case.rank, int(case.noise * 1000), case.outliers)
        self.case = case
        self.root = torch.randn(POINTS, case.rank, generator=stream, dtype=torch.float64) / math.sqrt(case.rank)
        truth = self.root @ torch.randn(case.rank, generator=stream, dtype=torch.float64)
        self.y = truth + case.noise * torch.randn(POINTS, generator=stream, dtype=torch.float64)
        if case.outliers:
            chosen = torch.rand(POINTS, generator=stream) < OUTLIERS
            signs = torch.randn(POINTS, generator=stream, dtype=torch.float64).sign()
            self.y = self.y + chosen * FAR * (1 + case.noise) * signs

    def evaluation(self, stream: torch.Generator) -> Evaluation:
        noise = self.case.noise**2
        f = torch.randn(self.case.draws, self.case.rank, generator=stream, dtype=torch.float64) @ self.root.T
        loglik = -0.5 * ((self.y - f).square() / noise + math.log(2 * math.pi * noise))
        split = SplitEvaluation(
            ids=torch.arange(POINTS),
            loglik=loglik,
            targets=self.y.unsqueeze(1),
            means=f.unsqueeze(2),
            variances=torch.full((1, 1, 1), noise, dtype=torch.float64),
        )
        covariance = self.root @ self.root.T + noise * torch.eye(POINTS, dtype=torch.float64)
        joint = GaussianJoint(torch.zeros(POINTS, dtype=torch.float64), covariance)
        weights = torch.zeros(self.case.draws, dtype=torch.float64)
        return Evaluation("regression", "draws", False, True, weights, {"test": split}, joint)


class GaussianLogits:
    """Logits of K classes, each a Gaussian function; labels of one draw."""

    def __init__(self, case: Case) -> None:
        stream = generator(0, "joint convergence classes", case.rank, int(case.noise * 1000))
        self.case = case
        self.root = torch.randn(POINTS, case.rank, generator=stream, dtype=torch.float64) / math.sqrt(case.rank)
        self.y = torch.multinomial(self.logits(1, stream)[0].softmax(-1), 1, generator=stream)[:, 0]

    def logits(self, draws: int, stream: torch.Generator) -> Tensor:
        z = torch.randn(draws, self.case.rank, NUM_CLASSES, generator=stream, dtype=torch.float64)
        return self.case.noise * (self.root @ z)

    def evaluation(self, stream: torch.Generator, draws: int = 0) -> Evaluation:
        draws = draws or self.case.draws
        pieces = [self.loglik(min(1000, draws - start), stream) for start in range(0, draws, 1000)]
        split = SplitEvaluation(ids=torch.arange(POINTS), loglik=torch.cat(pieces), targets=self.y)
        weights = torch.zeros(draws, dtype=torch.float64)
        return Evaluation("classification", "draws", False, True, weights, {"test": split})

    def loglik(self, draws: int, stream: torch.Generator) -> Tensor:
        log_probs = torch.log_softmax(self.logits(draws, stream), -1)
        return log_probs[:, torch.arange(POINTS), self.y]


def run(case: Case, sets: int) -> Outcome:
    """Score `sets` independent sets of draws."""
    stream = generator(1, "joint convergence draws", *(str(getattr(case, f.name)) for f in fields(case)))
    score = metric(case)
    if case.kind == "regression":
        gaussian = GaussianFunctions(case)
        rows = [score(gaussian.evaluation(stream), 0) for _ in range(sets)]
        known = rows[0][0].value
    else:
        logits = GaussianLogits(case)
        rows = [score(logits.evaluation(stream), 0) for _ in range(sets)]
        known = score(logits.evaluation(stream, REFERENCE_DRAWS), 0)[0].value
    found = [next(s for s in scores if s.draws == case.draws) for scores in rows]
    effective = [s.value for scores in rows for s in scores if s.metric.endswith("_effective_draws")]
    return outcome(case, known, found, effective)


def outcome(case: Case, known: float, found: Sequence[Score], effective: Sequence[float]) -> Outcome:
    bias = statistics.fmean(s.value for s in found) - known
    ok = [s.status == "ok" for s in found]
    biased = [abs(bias) > s.standard_error for s in found]
    clean = [abs(bias) <= s.standard_error / 2 for s in found]

    def share(flags: Iterable[bool]) -> float:
        return statistics.fmean(flags)

    outside = [abs(s.value - known) > 2 * s.standard_error for s in found]
    return Outcome(
        group=case.group,
        kind=case.kind,
        blocks=case.blocks,
        size=case.size,
        rank=case.rank,
        noise=case.noise,
        outliers=case.outliers,
        draws=case.draws,
        sets=len(found),
        known=known,
        bias=bias,
        standard_error=statistics.fmean(s.standard_error for s in found),
        effective_draws=statistics.fmean(effective),
        ok=share(ok),
        biased=share(biased),
        false_ok=share(a and b for a, b in zip(ok, biased, strict=True)),
        unbiased=share(clean),
        false_alarm=share(not a and b for a, b in zip(ok, clean, strict=True)),
        outside=share(a and b for a, b in zip(ok, outside, strict=True)),
    )


def grid() -> list[Case]:
    sizes = [("joint", tau) for tau in TAUS] + [("dyadic", kappa) for kappa in KAPPAS]
    return [
        Case("regression", blocks, size, rank, noise, draws, outliers)
        for (blocks, size), rank, noise, draws, outliers in product(sizes, RANKS, NOISES, DRAWS, (False, True))
    ]


def named() -> list[Case]:
    """Few effective draws: kappa = 5 with 1,000 draws, and tau = 10 at rank 5 with 100."""
    dyadic = [Case("regression", "dyadic", 5, 50, noise, 1000, group="kappa = 5") for noise in (0.3, 0.5, 1.0, 2.0)]
    joint = [Case("regression", "joint", 10, 5, noise, 100, group="tau = 10") for noise in (0.1, 0.3, 1.0, 3.0)]
    return dyadic + joint


def classes() -> list[Case]:
    sizes = [("joint", 1), ("joint", 10), ("dyadic", 2), ("dyadic", 5)]
    return [
        Case("classes", blocks, size, 5, scale, draws, group="classes")
        for (blocks, size), scale, draws in product(sizes, SCALES, (50, 100, 1000))
    ]


def summary(outcomes: Sequence[Outcome]) -> str:
    """Markdown: rates by kind of blocks, number of draws and outliers; each of the named cases."""
    heads = (
        "cases",
        "ok",
        "biased",
        "false ok / biased",
        "false ok / ok",
        "worst case",
        "false alarm / unbiased",
        "outside / ok",
    )

    def rates(found: Sequence[Outcome]) -> tuple[str, ...]:
        def mean(name: str) -> float:
            return statistics.fmean(getattr(o, name) for o in found)

        def ratio(a: float, b: float) -> str:
            return f"{100 * a / b:.1f} %" if b else "–"

        return (
            str(len(found)),
            ratio(mean("ok"), 1),
            ratio(mean("biased"), 1),
            ratio(mean("false_ok"), mean("biased")),
            ratio(mean("false_ok"), mean("ok")),
            ratio(max(o.false_ok for o in found), 1),
            ratio(mean("false_alarm"), mean("unbiased")),
            ratio(mean("outside"), mean("ok")),
        )

    on_grid = [o for o in outcomes if o.group == "grid"]
    parts = {
        "all of the grid": on_grid,
        "no outliers": [o for o in on_grid if not o.outliers],
        "with outliers": [o for o in on_grid if o.outliers],
    }
    for draws in DRAWS:
        parts[f"S = {draws:,}"] = [o for o in on_grid if o.draws == draws]
    for tau in TAUS:
        parts[f"joint, tau = {tau}"] = [o for o in on_grid if (o.blocks, o.size) == ("joint", tau)]
    for kappa in KAPPAS:
        parts[f"dyadic, kappa = {kappa}"] = [o for o in on_grid if (o.blocks, o.size) == ("dyadic", kappa)]
    for group in dict.fromkeys(o.group for o in outcomes if o.group != "grid"):
        parts[group] = [o for o in outcomes if o.group == group]
    first = [(name, *rates(found)) for name, found in parts.items() if found]
    second = [
        (
            o.group,
            f"{o.blocks} {o.size}",
            f"{o.rank}",
            f"{o.noise:g}",
            f"{o.draws:,}",
            f"{o.known:.2f}",
            f"{o.bias:+.2f}",
            f"{o.standard_error:.2f}",
            f"{o.effective_draws:.1f}",
            f"{100 * o.ok:.0f} %",
            f"{100 * o.false_ok:.0f} %",
        )
        for o in outcomes
        if o.group != "grid"
    ]
    names = (
        "case",
        "blocks",
        "rank",
        "noise or scale",
        "S",
        "known",
        "bias",
        "standard error",
        "effective",
        "ok",
        "false ok",
    )
    return "\n\n".join([markdown(("", *heads), first), markdown(names, second)])


def markdown(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [f"| {' | '.join(heads)} |", f"|{'---|' * len(heads)}"]
    return "\n".join(lines + [f"| {' | '.join(row)} |" for row in rows])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="20 cases with 5 sets of draws; nothing is written")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    cases = random.Random(0).sample(grid(), 20 if arguments.quick else CASES)
    cases += [] if arguments.quick else named() + classes()
    outcomes: list[Outcome] = []
    start = time.monotonic()
    for case in cases:
        outcomes.append(run(case, 5 if arguments.quick else SETS))
        if len(outcomes) % 20 == 0:
            print(f"{len(outcomes)} of {len(cases)} cases, {time.monotonic() - start:.0f} s", flush=True)
    text = summary(outcomes)
    print(text)
    if not arguments.quick:
        explanation = " ".join((__doc__ or "").split("\n\n")[3].split())
        out = io.StringIO()
        writer = csv.DictWriter(out, [f.name for f in fields(Outcome)], lineterminator="\n")
        writer.writeheader()
        writer.writerows(asdict(o) for o in outcomes)
        write_text(RESULTS / "joint_convergence.csv", out.getvalue())
        title = "# Joint scores from draws: how often ok is wrong"
        write_text(RESULTS / "joint_convergence.md", f"{title}\n\n{explanation}\n\n{text}\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
