"""Runs the preset of a published table and prints its numbers beside the published ones.

    python scripts/reproduce.py uci_mc_dropout                  all of it
    python scripts/reproduce.py uci_mc_dropout data=boston      less of it: further words go to bnn-run
    python scripts/reproduce.py concrete_dropout --only 10000   one row

Finished cells are not run again. Writes outputs/results/<table>.{csv,md}. The published numbers, with their sources,
stand in published.csv; a source marked V was read in its authors' files, V3 in a third party's text. "within" is
|ours − published| at most 2 √(SE₁² + SE₂²)
plus 0.05 for log-likelihoods; for the quantities that were published without a spread it is 20 % (standard deviations)
and 0.05 (dropout rates). Otherwise the script says which of the two is better.

MC dropout takes on each split the rate that is best for the log-likelihood of its validation part (a tenth of the
training points). Deep ensembles take the learning rate of a data set from the mean of that over its splits, and are
then trained at it on all training points.
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
from dataclasses import asdict, dataclass, fields
from pathlib import Path

from bnn_runner.cells import table_text
from bnn_runner.report.cells import Cell, find_cells
from bnn_runner.storage import write_text

HERE = Path(__file__).resolve().parent
RESULTS = HERE.parent / "outputs" / "results"
EPOCHS = {10: 2000, 25: 1000, 50: 500, 100: 200, 1000: 20, 10000: 2}
"""Of concrete dropout's toy, by the number of its training points."""
TRAINED_APART = ("method.rate", "schedule.lr", "data.val_fraction", "data.num_train")
"""What cells differ in that were not trained together."""
HEADINGS = ("data", "case", "quantity", "ours ± SE (n)", "published", "verdict", "source")
Published = Mapping[str, str]


def run(words: Sequence[str], output: Path) -> None:
    """One bnn-run; a failed cell is told by it and missing below."""
    subprocess.run([sys.executable, "-m", "bnn_runner.cli.main", *words, f"output_dir={output}"], check=False)


def score(cell: Cell, metric: str, split: str = "test") -> float:
    """The value of one score of a cell."""
    return next(s.value for s in cell.scores if s.metric == metric and s.split == split)


@dataclass(frozen=True)
class Line:
    """Our mean over n splits or repeats with its standard error, beside a published value."""

    data: str
    case: str
    quantity: str
    ours: float
    standard_error: float | None
    n: int
    published: str
    verdict: str
    source: str


def best_rates(cells: Sequence[Cell]) -> list[Cell]:
    """Of each data set and split the cell that is best on its validation part."""
    best: dict[tuple[str, int], Cell] = {}
    for cell in cells:
        key = cell.data, cell.seed
        if key not in best or score(cell, "marginal_loglik", "val") > score(best[key], "marginal_loglik", "val"):
            best[key] = cell
    return list(best.values())


def retrained(cells: Sequence[Cell]) -> list[Cell]:
    """Of each data set the cells without a validation part, at the learning rate that is best on one, on average.

    Not the best of each split: under 0.1 a network's mean runs away on some splits and not on others, which a tenth
    of the points does not foresee.
    """
    found: dict[str, dict[float, list[float]]] = {}
    for c in cells:
        if c.config["data.val_fraction"] > 0:
            rates = found.setdefault(c.data, {})
            rates.setdefault(c.config["schedule.lr"], []).append(score(c, "marginal_loglik", "val"))
    best = {data: max(rates, key=lambda lr: statistics.mean(rates[lr])) for data, rates in found.items()}
    print("\nlearning rates by validation: " + ", ".join(f"{data} {lr:g}" for data, lr in best.items()))
    for data, rates in found.items():
        told = (f"{lr:g}: {statistics.mean(v):.3f} ({len(v)} splits)" for lr, v in rates.items())
        print(f"  {data}: " + ", ".join(told))
    return [c for c in cells if c.config["data.val_fraction"] == 0 and c.config["schedule.lr"] == best.get(c.data)]


def cost(cells: Sequence[Cell]) -> str:
    """What the cells took; splits that were trained together share one training."""
    training: dict[tuple[object, ...], float] = {}
    rest, machine = 0.0, ""
    for cell in cells:
        facts = json.loads((cell.path / "provenance.json").read_text(encoding="utf-8"))
        together = (cell.data, *(cell.config.get(k) for k in TRAINED_APART))
        training[together] = max(training.get(together, 0.0), facts["seconds"].get("training", 0.0))
        rest += sum(seconds for stage, seconds in facts["seconds"].items() if stage != "training")
        machine = f"{facts['threads']} threads, {facts['device']}"
    total = sum(training.values())
    return f"{len(cells)} cells: training {total / 60:.1f} min, the rest {rest / 60:.1f} min of wall-clock ({machine})"


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


def compare(ours: Sequence[float], row: Published) -> Line | None:
    """The line of a published quantity; None where none of its cells is done."""
    if not ours:
        return None
    theirs = row["value"] + (f" ± {row['spread']} {row['kind']}" if row["spread"] else "")
    return Line(
        row["data"],
        row["case"],
        row["quantity"],
        statistics.mean(ours),
        statistics.stdev(ours) / math.sqrt(len(ours)) if len(ours) > 1 else None,
        len(ours),
        theirs,
        verdict(ours, row),
        f"{row['source']} [{row['status']}]",
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("table", choices=("uci_mc_dropout", "uci_ensemble", "concrete_dropout"))
    parser.add_argument("words", nargs="*", help="further words for bnn-run")
    parser.add_argument("--output", type=Path, default=Path("outputs/reproduce"), help="folder of the cells")
    parser.add_argument("--no-run", action="store_true", help="only the table, of the cells that are there")
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder of the tables")
    parser.add_argument("--only", type=int, action="append", choices=sorted(EPOCHS), help="rows of concrete_dropout")
    arguments = parser.parse_intermixed_args()
    table, output = arguments.table, arguments.output / arguments.table
    if arguments.no_run:
        pass
    elif table == "concrete_dropout":
        for count in arguments.only or EPOCHS:
            sizes = [f"data.num_train={count}", f"schedule.epochs={EPOCHS[count]}"]
            run(["experiment=concrete_dropout_table", *sizes, *arguments.words], output)
    else:
        run(["-m", f"experiment={table}", *arguments.words], output)
    cells = every = [c for c in find_cells(output) if c.status == "done"]
    if table == "uci_mc_dropout":
        cells = best_rates(cells)
    elif table == "uci_ensemble":
        cells = retrained(cells)
    with (HERE / "published.csv").open(encoding="utf-8") as file:
        rows = [r for r in csv.DictReader(file) if r["table"] == table]
    lines = [line for row in rows if (line := compare(values(cells, row), row)) is not None]
    text = [f"| {' | '.join(HEADINGS)} |", "|---|---|---|--:|---|---|---|"]
    for line in lines:
        error = "" if line.standard_error is None else f" ± {line.standard_error:.2g}"
        ours = f"{line.ours:.4g}{error} ({line.n})"
        told = [line.data, line.case, line.quantity, ours, line.published, line.verdict, line.source]
        text.append(f"| {' | '.join(told)} |")
    text += ["", f"{cost(every)}."] if every else []
    print("\n" + "\n".join(text))
    write_text(arguments.results / f"{table}.md", "\n".join(text) + "\n")
    columns = [f.name for f in fields(Line)]
    write_text(arguments.results / f"{table}.csv", table_text([asdict(line) for line in lines], columns))
    return 0


if __name__ == "__main__":
    sys.exit(main())
