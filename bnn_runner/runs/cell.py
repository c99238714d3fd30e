"""Cells: the folder of one run, its status, and the tables in it."""

from __future__ import annotations

import csv
import io
import json
import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bnn_runner.config.keys import cell_hash
from bnn_runner.runs.status import Status, facts_of, set_status, status_of
from bnn_runner.runtime.files import write_json, write_text
from bnn_runner.scoring import SCORE_COLUMNS, Score

if TYPE_CHECKING:
    from bnn_runner.experiment import Experiment


@dataclass(frozen=True)
class Cell:
    """The cell in the folder `root`/runs/<data>/<model>/<method>/<seed>-<first 8 digits of hash>."""

    root: Path
    data: str
    model: str
    method: str
    seed: int
    hash: str

    @property
    def folder(self) -> Path:
        return self.root / "runs" / self.data / self.model / self.method / f"{self.seed}-{self.hash[:8]}"

    def status(self) -> Status:
        return status_of(self.folder)

    def set_status(self, status: Status, text: str) -> None:
        set_status(self.folder, status, text)

    @property
    def fit_checkpoint(self) -> Path:
        """File with the state of a long posterior fit, until the cell is finished."""
        return self.folder / "fit.partial"

    def finish(self) -> None:
        """Deletes the checkpoint and sets the status to done."""
        self.fit_checkpoint.unlink(missing_ok=True)
        self.set_status("done", json.dumps({"finished": time.strftime("%Y-%m-%dT%H:%M:%S%z")}))

    def facts(self) -> dict[str, Any]:
        """Returns the content of cell.json; {} if there is none."""
        return facts_of(self.folder)

    def write_scores(self, scores: Sequence[Score]) -> None:
        """Writes metrics.csv: one row per score, its fields as columns; not-a-number is written as "nan"."""
        rows = [{name: getattr(s, name) for name in SCORE_COLUMNS} for s in scores]
        write_text(self.folder / "metrics.csv", table_text(rows, SCORE_COLUMNS))

    def write_history(
        self, histories: Sequence[Sequence[Mapping[str, float]]], fit: Sequence[Mapping[str, float]] = ()
    ) -> None:
        """Writes history.csv: one row per member and epoch, then the rows of `fit` as member "posterior".

        Args:
            histories: The training history of each member.
            fit: The history of the posterior's own fit.
        """
        rows: list[dict[str, Any]] = [{"member": i, **row} for i, history in enumerate(histories) for row in history]
        rows += [{"member": "posterior", **row} for row in fit]
        columns = list(dict.fromkeys(key for row in rows for key in row)) or ["member"]
        write_text(self.folder / "history.csv", table_text(rows, columns))

    def write_tuning(self, traces: Sequence[Sequence[Mapping[str, Any]]]) -> None:
        """Writes hyper.csv: one row per member and update of the prior in training; no file without updates."""
        rows = [{"member": i, **row} for i, trace in enumerate(traces) for row in trace]
        if rows:
            columns = list(dict.fromkeys(key for row in rows for key in row))
            write_text(self.folder / "hyper.csv", table_text(rows, columns))


def cell_of(experiment: Experiment) -> Cell:
    """Returns the cell of an experiment with one seed."""
    return Cell(
        root=experiment.settings.output_dir,
        data=str(experiment.choices["data"]),
        model=str(experiment.choices["model"]),
        method=str(experiment.choices["method"]),
        seed=experiment.settings.seed,
        hash=cell_hash(experiment.config, experiment.uses_hyper, experiment.method.finite),
    )


def table_text(rows: Sequence[Mapping[str, Any]], columns: Sequence[str]) -> str:
    """Returns rows as CSV text; None becomes empty, not-a-number becomes "nan"."""
    out = io.StringIO()
    writer = csv.DictWriter(out, fieldnames=list(columns), lineterminator="\n")
    writer.writeheader()
    for row in rows:
        writer.writerow({k: "nan" if isinstance(v, float) and math.isnan(v) else v for k, v in row.items()})
    return out.getvalue()


def headline(scores: Sequence[Score]) -> dict[str, float]:
    """Returns each metric's first finite value on the test set."""
    values: dict[str, float] = {}
    for score in scores:
        if score.split == "test" and math.isfinite(score.value):
            values.setdefault(score.metric, score.value)
    return values


def write_description(cell: Cell, facts: Mapping[str, Any]) -> None:
    """Writes cell.json, atomically."""
    write_json(cell.folder / "cell.json", dict(facts))
