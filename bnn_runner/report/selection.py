"""Selection of settings on validation data: by `bnn-report --select`, and by the published rule of an experiment."""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace

from bnn_runner.errors import UserError
from bnn_runner.report.columns import Column, unknown
from bnn_runner.report.filters import field_text, known_fields
from bnn_runner.report.grouping import is_neutral, value_text
from bnn_runner.report.read_cells import CellRecord

VALIDATION = Column("marginal_loglik", "val")
SELECTED = "selected"
"""What a selected field reads in a table, so that the seeds of one row may have different values."""


def selected_cells(cells: Sequence[CellRecord], experiment: str) -> tuple[list[CellRecord], str]:
    """The cells that count, and the rule in words; all cells and "" if the experiment has no rule."""
    if experiment not in RULES:
        return list(cells), ""
    select, words = RULES[experiment]
    return select(cells), words


def selected_by_validation(cells: Sequence[CellRecord], fields: Sequence[str]) -> tuple[list[CellRecord], list[str]]:
    """Of the cells that differ only in `fields`, the one with the highest validation log-likelihood, seed by seed.

    Cells without these fields are kept. In the selected ones the fields read `SELECTED`. Unfinished cells of a
    selection are left out. Also returns one note for each method, which counts the values that were selected.

    Raises:
        UserError: for a field that no cell has, and for finished cells without a validation part.
    """
    known = known_fields(cells)
    problems = [unknown("field", f, known, "--select") for f in fields if f not in known]
    if problems:
        raise UserError(*problems)
    rivals: dict[tuple[object, ...], list[CellRecord]] = {}
    kept: list[CellRecord] = []
    for cell in cells:
        if not cell.config or not any(f in cell.config for f in fields):
            kept.append(cell)
            continue
        others = ((f, value_text(v)) for f, v in cell.config.items() if f not in fields and not is_neutral(f))
        rivals.setdefault((cell.data, cell.model, cell.method, cell.seed, tuple(sorted(others))), []).append(cell)
    chosen: dict[tuple[str, str], Counter[str]] = {}
    seen: dict[tuple[str, str], set[str]] = {}
    for found in rivals.values():
        done = [c for c in found if c.status == "done"]
        if len(found) == 1 or not done:
            kept += found
            continue
        without = [c.name for c in done if not math.isfinite(validation(c))]
        if without:
            raise UserError(
                f"--select requires a validation log-likelihood of every run; {without[0]} has none. Set "
                "data.val_fraction above 0, or run metric=marginal."
            )
        best = max(done, key=validation)
        kept.append(replace(best, config={**best.config, **{f: SELECTED for f in fields if f in best.config}}))
        place = best.data, best.method
        chosen.setdefault(place, Counter())[_values(best, fields)] += 1
        seen.setdefault(place, set()).update(_values(c, fields) for c in done)
    notes = []
    for (data, method), counts in chosen.items():
        picked = ", ".join(f"{value} ({n} of {counts.total()})" for value, n in counts.most_common())
        notes.append(
            f"{data}/{method}: {' and '.join(fields)} selected on the validation part of each seed, among "
            f"{len(seen[data, method])} values: {picked}."
        )
    return kept, notes


def _values(cell: CellRecord, fields: Sequence[str]) -> str:
    return " ".join(field_text(cell, f) or "" for f in fields if f in cell.config)


def best_of_each_seed(cells: Sequence[CellRecord]) -> list[CellRecord]:
    """The best cell on its validation part, for each data set, network, method and seed."""
    best: dict[tuple[object, ...], CellRecord] = {}
    for cell in cells:
        key = (cell.data, cell.model, cell.method, cell.seed, cell.config.get("data.splits"))
        if key not in best or validation(cell) > validation(best[key]):
            best[key] = cell
    return list(best.values())


def retrained(cells: Sequence[CellRecord]) -> list[CellRecord]:
    """The cells without a validation part, at the learning rate that is best on average on the validation parts.

    Not the best rate per split: with 0.1 a network's mean diverges on some splits, which a tenth of the points does
    not predict.
    """
    found: dict[str, dict[float, list[float]]] = {}
    for c in cells:
        if c.config["data.val_fraction"] > 0:
            found.setdefault(c.data, {}).setdefault(c.config["schedule.lr"], []).append(validation(c))
    best = {data: max(rates, key=lambda lr: statistics.mean(rates[lr])) for data, rates in found.items()}
    return [c for c in cells if c.config["data.val_fraction"] == 0 and c.config["schedule.lr"] == best.get(c.data)]


def validation(cell: CellRecord) -> float:
    """Marginal log-likelihood of the validation part; −∞ if there is no score."""
    score = cell.main_scores.get(VALIDATION)
    return float("-inf") if score is None else score.value


Rule = Callable[[Sequence[CellRecord]], list[CellRecord]]
RULES: dict[str, tuple[Rule, str]] = {
    "uci_mc_dropout": (best_of_each_seed, "Each split uses the dropout rate that is best on its validation part."),
    "uci_ensemble": (
        retrained,
        "The learning rate of a data set is the best on the validation parts, on average over splits; the networks are "
        "then trained on all training points.",
    ),
}
