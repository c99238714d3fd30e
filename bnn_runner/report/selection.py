"""Selection of settings on validation data, for experiments whose published rule does the same."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence

from bnn_runner.report.columns import Column
from bnn_runner.report.read_cells import CellRecord

VALIDATION = Column("marginal_loglik", "val")


def selected_cells(cells: Sequence[CellRecord], experiment: str) -> tuple[list[CellRecord], str]:
    """The cells that count, and the rule in words; all cells and "" if the experiment has no rule."""
    if experiment not in RULES:
        return list(cells), ""
    select, words = RULES[experiment]
    return select(cells), words


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
