"""Where a published rule chose a setting by validation, the same choice among an experiment's runs."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence

from bnn_runner.report.columns import Column
from bnn_runner.report.read_cells import CellRecord

VALIDATION = Column("marginal_loglik", "val")


def chosen_cells(cells: Sequence[CellRecord], experiment: str) -> tuple[list[CellRecord], str]:
    """The cells that count, and the rule in words; all of them and no words where the experiment has no rule."""
    if experiment not in RULES:
        return list(cells), ""
    choose, words = RULES[experiment]
    return choose(cells), words


def best_of_each_seed(cells: Sequence[CellRecord]) -> list[CellRecord]:
    """Of each data set, network, method and seed the cell that is best on its validation part."""
    best: dict[tuple[object, ...], CellRecord] = {}
    for cell in cells:
        key = (cell.data, cell.model, cell.method, cell.seed, cell.config.get("data.splits"))
        if key not in best or validation(cell) > validation(best[key]):
            best[key] = cell
    return list(best.values())


def retrained(cells: Sequence[CellRecord]) -> list[CellRecord]:
    """Of each data set the cells without a validation part, at the learning rate that is best on one, on average.

    Not the best of each split: under 0.1 a network's mean runs away on some splits and not on others, which a tenth
    of the points does not foresee.
    """
    found: dict[str, dict[float, list[float]]] = {}
    for c in cells:
        if c.config["data.val_fraction"] > 0:
            found.setdefault(c.data, {}).setdefault(c.config["schedule.lr"], []).append(validation(c))
    best = {data: max(rates, key=lambda lr: statistics.mean(rates[lr])) for data, rates in found.items()}
    return [c for c in cells if c.config["data.val_fraction"] == 0 and c.config["schedule.lr"] == best.get(c.data)]


def validation(cell: CellRecord) -> float:
    """Marginal log-likelihood of the validation part; −∞ where it is not scored."""
    score = cell.main_scores.get(VALIDATION)
    return float("-inf") if score is None else score.value


Rule = Callable[[Sequence[CellRecord]], list[CellRecord]]
RULES: dict[str, tuple[Rule, str]] = {
    "uci_mc_dropout": (best_of_each_seed, "Of each split the rate that is best on its validation part."),
    "uci_ensemble": (
        retrained,
        "The learning rate of a data set is the best on validation parts, on average over splits; trained with it on "
        "all training points.",
    ),
}
