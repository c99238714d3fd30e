"""The page of scripts/laplace_defaults.py: tables of its rows, and the choice that their validation columns make."""

from __future__ import annotations

import math
import platform
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from bnn_runner import __version__
from bnn_runner.hyper.grid import Grid

FIRST_LIMIT = 0.1
"""Share of the networks on which a rule was allowed to lose when the study began; see `choice`."""
SMALL_NATS = 1e-3
"""A smaller loss of the marginal counts as none: that of a posterior that is almost the network has no error either."""
Rows = Sequence[Mapping[str, Any]]


@dataclass(frozen=True)
class Mean:
    """Differences of one rule on one data set, network and structure, over seeds.

    Seeds share points, so the error of their mean is taken to be that of one of them, on average.
    """

    data: str
    model: str
    structure: str
    rule: str
    seeds: int
    values: Mapping[str, float]
    precisions: tuple[float, ...]
    notes: tuple[str, ...]

    def error(self, score: str) -> float:
        return self.values[f"{score}_error"]

    def loses(self, score: str) -> bool:
        return self.values[score] < -max(2 * self.error(score), SMALL_NATS)

    def text(self, score: str, digits: int = 3) -> str:
        return f"{self.values[score]:+.{digits}f} ± {self.error(score):.{digits}f}"


def means(rows: Rows) -> list[Mean]:
    groups: dict[tuple[str, str, str, str], list[Mapping[str, Any]]] = {}
    for row in rows:
        groups.setdefault((row["data"], row["model"], row["structure"], row["rule"]), []).append(row)
    numbers = [k for k, v in rows[0].items() if isinstance(v, float) and k not in ("precision", "temperature")]
    return [
        Mean(
            *key,
            len(group),
            {n: sum(r[n] for r in group) / len(group) for n in numbers},
            tuple(r["precision"] for r in group),
            tuple(r["note"] for r in group if r["note"]),
        )
        for key, group in groups.items()
    ]


def table(heads: Sequence[str], lines: Iterable[Sequence[str]]) -> list[str]:
    body = ["| " + " | ".join(line) + " |" for line in lines]
    return ["| " + " | ".join(heads) + " |", "|" + "---|" * len(heads), *body, ""]


def main_structure(found: Sequence[Mean]) -> list[Mean]:
    """Of each data set and network the structure that method=laplace takes (auto), or the first that was run."""
    first: dict[tuple[str, str], str] = {}
    for mean in found:
        first.setdefault((mean.data, mean.model), mean.structure)
    return [m for m in found if m.structure == first[m.data, m.model]]


def by_rule(found: Sequence[Mean], keep: Callable[[str], bool] = lambda rule: True) -> dict[str, list[Mean]]:
    rules: dict[str, list[Mean]] = {}
    for mean in found:
        if keep(mean.rule):
            rules.setdefault(mean.rule, []).append(mean)
    return rules


def lost(each: Sequence[Mean], part: str = "validation") -> int:
    return sum(m.loses(f"{part}_marginal") for m in each)


def gain(each: Sequence[Mean]) -> float:
    """Mean gain of the dyadic score on the validation part."""
    return sum(m.values["validation_dyadic"] for m in each) / len(each)


def choice(rules: Mapping[str, Sequence[Mean]]) -> str:
    """Of the rules that were run on every network, and lose on the fewest of them, the one that gains most jointly.

    At first a rule was allowed to lose on a tenth of the networks. `page` says which rules keep that limit.
    """
    most = max(map(len, rules.values()))
    whole = {rule: each for rule, each in rules.items() if len(each) == most}
    return min(whole, key=lambda rule: (lost(whole[rule]), -gain(whole[rule])))


def _summary(rules: Mapping[str, Sequence[Mean]]) -> Iterable[list[str]]:
    for rule, each in rules.items():
        cells = [rule, str(len(each))]
        for part in ("validation", "test"):
            marginal, dyadic = ([m.values[f"{part}_{s}"] for m in each] for s in ("marginal", "dyadic"))
            above = sum(d > 0 for d in dyadic)
            cells += [
                f"{sum(marginal) / len(each):+.4f}",
                str(lost(each, part)),
                f"{sum(dyadic) / len(each):+.3f}",
                str(above),
            ]
        yield cells


def _reasons(rules: Mapping[str, Sequence[Mean]], chosen: str) -> list[str]:
    lines = []
    for rule, each in rules.items():
        words = (
            f"- {rule}: loses more than two standard errors of the marginal on {lost(each)} of {len(each)} networks, "
        )
        words += f"and gains {gain(each):.3f} nats per dyadic block on average"
        lines.append(words + (" (chosen)" * (rule == chosen)))
    return [*lines, ""]


def default_rule() -> str:
    """The rule of this study that hyper=grid is by default."""
    grid = Grid()
    errors = {0.0: "", 0.5: ", 0.5 SE", 1.0: ", 1 SE"}.get(grid.standard_errors, f", {grid.standard_errors:g} SE")
    return f"grid by {grid.score}{errors}"


def page(rows: Rows) -> str:
    """The whole page, in Markdown."""
    if not rows:
        return "# Which rule for the prior precision\n\nNothing was run yet.\n"
    found = means(rows)
    main = main_structure(found)
    rules = by_rule(main)
    everywhere = max(map(len, rules.values()))
    compared = {r: each for r, each in rules.items() if len(each) == everywhere}
    chosen, default = choice(compared), default_rule()
    kept = [rule for rule, each in compared.items() if lost(each) <= FIRST_LIMIT * len(each)]
    seconds = sum(max(r["seconds"] for r in rows if _cell(r) == cell) for cell in {_cell(r) for r in rows})
    agreement = "It is the default of hyper=grid." if chosen == default else f"The default of hyper=grid is {default}."
    lines = [
        "# Which rule for the prior precision of Laplace, on classes",
        "",
        f"Made by `python scripts/laplace_defaults.py`: {len({_cell(r) for r in rows})} networks of "
        f"{len({(r['data'], r['model']) for r in rows})} pairs of data set and model, about {seconds / 60:.0f} minutes "
        f"of fits (bnn_runner {__version__}, torch {torch.__version__.split('+')[0]}, Python "
        f"{platform.python_version()}, one thread).",
        "",
        "Every number is a difference to the network itself (MAP) at the same points: the marginal log-likelihood in "
        "nats per point, the dyadic one (kappa = 2, 10 labels) in nats per block, ± the paired standard error over "
        "points or blocks. Seeds share points, so the error of their mean is taken to be that of one seed. The "
        "validation columns are by two halves: a rule that selects by validation selects on one half and is scored on "
        "the other. The default is chosen by them alone; the test columns were looked at afterwards. `SE` rules take "
        "the smallest precision within so many standard errors of the best (or 5e-4 nats per label), as "
        "`hyper.standard_errors`.",
        "",
        f"## All networks ({everywhere}), with the structure of method=laplace",
        "",
        "`lost`: networks whose posterior's marginal is more than two standard errors (and 0.001 nats) below their "
        "own. `above`: those whose posterior's dyadic score is above. Rules that were not run on all networks are in "
        "the tables below.",
        "",
        *table(
            ("rule", "networks", "validation marginal", "lost", "dyadic", "above", "test marginal", "lost", "dyadic",
             "above"),
            _summary(compared),
        ),
        "**Choice.** Of the rules that lose on the fewest networks by the validation columns, the one with the largest "
        f"dyadic gain: **{chosen}**. {agreement} The criterion was changed once after numbers had been seen: at first, "
        f"the rule with the largest dyadic gain was to be taken among those that lose on at most a tenth of the "
        f"networks, which {', '.join(kept) or 'no rule'} {'does' if len(kept) < 2 else 'do'}.",
        "",
        *_reasons(compared, chosen),
        "## Networks with normalisation: where the evidence is taken",
        "",
        *_pairs(main, lambda m: "mlp_" in m.model or "norm" in m.model or "frn" in m.model or "standard" in m.model
                or "resnet" in m.model),
        "## Structures",
        "",
        *_structures(found),
        "## Each data set and network",
        "",
        *_pairs(main, lambda m: True, {r for r in compared if r.startswith("grid by") or r == "evidence at w*"}),
    ]  # fmt: skip
    return "\n".join(lines).rstrip() + "\n"


def _cell(row: Mapping[str, Any]) -> tuple[Any, ...]:
    return row["data"], row["model"], row["seed"]


HEADS = ("data", "model", "structure", "rule", "seeds", "precision", "validation marginal", "validation dyadic")
HEADS += ("test marginal", "test dyadic", "accuracy")


def _line(mean: Mean) -> list[str]:
    finite = sorted(p for p in mean.precisions if math.isfinite(p))
    precision = f"{finite[len(finite) // 2]:.2g}" if finite else "several"
    rule = mean.rule + (f" ({'; '.join(dict.fromkeys(mean.notes))})" if mean.notes else "")
    scores = [mean.text(f"{part}_{score}") for part in ("validation", "test") for score in ("marginal", "dyadic")]
    words = [mean.data, mean.model, mean.structure, rule, str(mean.seeds), precision]
    return [*words, *scores, f"{mean.values['test_accuracy']:+.3f}"]


def _pairs(found: Sequence[Mean], keep: Callable[[Mean], bool], rules: set[str] | None = None) -> list[str]:
    kept = [m for m in found if keep(m) and (rules is None or m.rule in rules)]
    return table(HEADS, map(_line, kept)) if kept else ["Not run yet.", ""]


def _structures(found: Sequence[Mean]) -> list[str]:
    several = {(m.data, m.model) for m in found if m.structure != "auto"}
    kept = [m for m in found if (m.data, m.model) in several and m.rule in ("evidence at w*", default_rule())]
    return table(HEADS, map(_line, kept)) if kept else ["Not run yet.", ""]
