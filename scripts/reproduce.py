"""Runs the preset of a published table and prints its numbers beside the published ones.

    python scripts/reproduce.py uci_mc_dropout                  all of it
    python scripts/reproduce.py uci_mc_dropout data=boston      less of it: further words go to bnn-run
    python scripts/reproduce.py concrete_dropout --only 10000   one row

Finished cells are not run again. The published numbers, with their sources, stand in published.csv; a source marked V
was read in its authors' files, V3 in a third party's text. "within" is |ours − published| at most 2 √(SE₁² + SE₂²)
plus 0.05 for log-likelihoods; for the quantities that were published without a spread it is 20 % (standard deviations)
and 0.05 (dropout rates). Otherwise the script says which of the two is better.

MC dropout takes on each split the rate that is best for the log-likelihood of its validation part.
"""

from __future__ import annotations

import argparse
import csv
import json
import math
import statistics
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from bnn_runner.report.cells import Cell, find_cells

HERE = Path(__file__).resolve().parent
EPOCHS = {10: 2000, 25: 1000, 50: 500, 100: 200, 1000: 20, 10000: 2}
"""Of concrete dropout's toy, by the number of its training points."""
Published = Mapping[str, str]


def run(words: Sequence[str], output: Path) -> None:
    """One bnn-run; a failed cell is told by it and missing below."""
    subprocess.run([sys.executable, "-m", "bnn_runner.cli.main", *words, f"output_dir={output}"], check=False)


def score(cell: Cell, metric: str, split: str = "test") -> float:
    """The value of one score of a cell."""
    return next(s.value for s in cell.scores if s.metric == metric and s.split == split)


def best_rates(cells: Sequence[Cell]) -> list[Cell]:
    """Of each data set and split the cell that is best on its validation part."""
    best: dict[tuple[str, int], Cell] = {}
    for cell in cells:
        key = cell.data, cell.seed
        if key not in best or score(cell, "marginal_loglik", "val") > score(best[key], "marginal_loglik", "val"):
            best[key] = cell
    return list(best.values())


def values(cells: Sequence[Cell], row: Published) -> list[float]:
    """Our values of a published quantity, one a split or repeat."""
    mine = [c for c in cells if c.data == row["data"]]
    if row["table"] == "concrete_dropout":
        mine = [c for c in mine if str(c.config.get("data.num_train")) == row["case"]]
    quantity = row["quantity"]
    if quantity.startswith("rate "):
        reports = [json.loads((c.path / "cell.json").read_text())["report"] for c in mine]
        return [r["rates"][quantity.removeprefix("rate ")] for r in reports]
    return [score(c, "marginal_loglik" if quantity == "loglik" else quantity) for c in mine]


def verdict(ours: Sequence[float], row: Published) -> str:
    """How ours compares, by the tolerances above."""
    published, mean = float(row["value"]), statistics.mean(ours)
    quantity, gap = row["quantity"], statistics.mean(ours) - float(row["value"])
    if quantity.startswith("rate "):
        tolerance = 0.05
    elif not row["spread"]:
        tolerance = 0.2 * published
    else:
        theirs = float(row["spread"]) / (math.sqrt(float(row["n"])) if row["kind"] == "std" else 1)
        mine = statistics.stdev(ours) / math.sqrt(len(ours)) if len(ours) > 1 else 0.0
        tolerance = 2 * math.hypot(theirs, mine) + (0.05 if quantity == "loglik" else 0)
    if abs(gap) <= tolerance:
        return "within"
    if quantity == "rmse":
        return "better" if mean < published else "WORSE"
    if quantity == "loglik":
        return "better" if mean > published else "WORSE"
    return "DIFFERS"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("table", choices=("uci_mc_dropout", "uci_ensemble", "concrete_dropout"))
    parser.add_argument("words", nargs="*", help="further words for bnn-run")
    parser.add_argument("--output", type=Path, default=Path("outputs/reproduce"), help="folder of the cells")
    parser.add_argument("--only", type=int, action="append", choices=sorted(EPOCHS), help="rows of concrete_dropout")
    arguments = parser.parse_intermixed_args()
    table, output = arguments.table, arguments.output / arguments.table
    if table == "concrete_dropout":
        for count in arguments.only or EPOCHS:
            sizes = [f"data.num_train={count}", f"schedule.epochs={EPOCHS[count]}"]
            run(["experiment=concrete_dropout_table", *sizes, *arguments.words], output)
    else:
        run(["-m", f"experiment={table}", *arguments.words], output)
    cells = [c for c in find_cells(output) if c.status == "done"]
    if table == "uci_mc_dropout":
        cells = best_rates(cells)
    with (HERE / "published.csv").open(encoding="utf-8") as file:
        rows = [r for r in csv.DictReader(file) if r["table"] == table]
    print(f"\n{'data':<10} {'case':<9} {'quantity':<14} {'ours (SE, n)':<22} {'published':<18} verdict   source")
    for row in rows:
        ours = values(cells, row)
        if not ours:
            continue
        error = f"{statistics.stdev(ours) / math.sqrt(len(ours)):.2g}" if len(ours) > 1 else "-"
        mine = f"{statistics.mean(ours):.4g} ({error}, {len(ours)})"
        theirs = row["value"] + (f" ± {row['spread']} {row['kind']}" if row["spread"] else "")
        source = f"{row['source']} [{row['status']}]"
        place = f"{row['data']:<10} {row['case']:<9} {row['quantity']:<14}"
        print(f"{place} {mine:<22} {theirs:<18} {verdict(ours, row):<9} {source}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
