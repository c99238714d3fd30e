"""Reads every cell under `<output_dir>/runs`, whatever its state: finished, failed, cut, unfinished or damaged.

A cell that could not be read never stops the report; it is kept with the reason, so that it can be listed.
"""

from __future__ import annotations

import csv
import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, cached_property
from operator import itemgetter
from pathlib import Path
from typing import Any, Literal, NamedTuple

from bnn_runner.report.columns import Column
from bnn_runner.report.marks import kinds_of

Status = Literal["done", "failed", "interrupted", "unfinished", "damaged"]

_STATUS_FILES: tuple[tuple[str, Status], ...] = (("DONE", "done"), ("FAILED", "failed"), ("INTERRUPTED", "interrupted"))
_FOLDER_NAME = re.compile(r"(-?\d+)-([0-9a-fA-F]+)")
_EVIDENCE = (
    "evidence_nats",
    "evidence_over",
    "mode",
    "structure",
    "newton_decrement_nats",
    "tangent_gap_nats",
    "evidence_below_constant",
)
_NEEDED_COLUMNS = ("metric", "value", "split", "status")


class ScoreRow(NamedTuple):
    """One line of metrics.csv: the fields of `base.Score`, without importing torch to name them."""

    metric: str
    value: float
    standard_error: float = math.nan
    n: int = 0
    split: str = "test"
    tau: int | None = None
    kappa: int | None = None
    draws: int | None = None
    better: str = ""
    unit: str = ""
    status: str = "ok"
    note: str = ""

    @property
    def column(self) -> Column:
        """The table column of this score."""
        return _column(self.metric, self.split, self.tau, self.kappa)


@cache
def _column(metric: str, split: str, tau: int | None, kappa: int | None) -> Column:
    """One object per kind of score: the report of a sweep reads hundreds of thousands."""
    return Column(metric, split, tau, kappa)


@dataclass(frozen=True)
class CellRecord:
    """One cell folder. What could not be read is empty, and `reason` says why.

    `reason` is the first line of FAILED or INTERRUPTED, or what is damaged. `config` is the flattened
    resolved configuration, empty where cell.json is not there yet. `content` is a hash of the user's own data files.
    """

    path: Path
    status: Status
    data: str
    model: str
    method: str
    seed: int
    reason: str = ""
    hash: str = ""
    kind: str = ""
    version: str = ""
    results_version: int | None = None
    shortened: Mapping[str, Any] | None = None
    choices: Mapping[str, str] = field(default_factory=dict)
    config: Mapping[str, Any] = field(default_factory=dict)
    content: str = ""
    scores: tuple[ScoreRow, ...] = ()
    evidence: Mapping[str, Any] = field(default_factory=dict)
    marks: tuple[str, ...] = ()
    epochs: Mapping[str, Any] = field(default_factory=dict)

    @property
    def name(self) -> str:
        """data/model/method/seed-hash, the path of the folder."""
        return "/".join(self.path.parts[-4:])

    @cached_property
    def main_scores(self) -> dict[Column, ScoreRow]:
        """For each column the score with the most draws (the others show its convergence)."""
        found: dict[Column, ScoreRow] = {}
        for score in self.scores:
            kept = found.get(score.column)
            if kept is None or (score.draws or 0) > (kept.draws or 0):
                found[score.column] = score
        return found


def find_cells(output_dir: Path) -> list[CellRecord]:
    """Every cell under `output_dir`/runs, in the order of their paths; empty if there are none."""
    folders = sorted(p for p in (output_dir / "runs").glob("*/*/*/*") if p.is_dir() and not p.name.startswith("."))
    # A folder without the name or the files of a cell is not ours.
    return [read_cell(p) for p in folders if _FOLDER_NAME.fullmatch(p.name) or (p / "cell.json").exists()]


def read_cell(folder: Path) -> CellRecord:
    """One cell; never raises for what is in the folder."""
    data, model, method = folder.parts[-4:-1]
    match = _FOLDER_NAME.fullmatch(folder.name)
    if match is None:
        return CellRecord(folder, "damaged", data, model, method, -1, reason="its folder must be called <seed>-<hash>")
    seed = int(match[1])
    status, reason = _status(folder)
    problems: list[str] = []
    facts = _read_facts(folder, status, problems)
    for key, expected in (("data", data), ("model", model), ("method", method), ("seed", seed)):
        if key in facts and facts[key] != expected:
            problems.append(f"{key} is {expected} in the path and {facts[key]} in cell.json (was the folder copied?)")
    scores: tuple[ScoreRow, ...] = ()
    if status == "done" and not problems:
        try:
            scores = read_scores(folder / "metrics.csv")
        except (OSError, ValueError, csv.Error) as error:
            problems.append(f"could not read metrics.csv: {_first_line(str(error)) or type(error).__name__}")
    if problems:
        status, reason = "damaged", "; ".join(problems)
    return CellRecord(
        folder,
        status,
        data,
        model,
        method,
        seed,
        reason=reason,
        hash=match[2],
        kind=str(facts.get("kind", "")),
        version=str(facts.get("version", "")),
        results_version=facts.get("results_version", facts.get("recipe")),
        shortened=facts.get("shortened") or None,
        choices={str(k): str(v) for k, v in _mapping(facts, "choices").items()},
        config=_mapping(facts, "config"),
        content=str(facts.get("content") or ""),
        scores=scores,
        evidence={k: v for k, v in _mapping(facts, "report").items() if k in _EVIDENCE and v is not None},
        marks=kinds_of(_mapping(facts, "report")),
        epochs=_mapping(facts, "epochs"),
    )


def read_scores(path: Path) -> tuple[ScoreRow, ...]:
    """The rows of a metrics.csv. Raises OSError, csv.Error or ValueError if it is not one."""
    with path.open(encoding="utf-8", newline="") as file:
        reader = csv.reader(file, strict=True, skipinitialspace=True)
        names = next(reader, [])
        absent = [c for c in _NEEDED_COLUMNS if c not in names]
        if absent:
            raise ValueError(f"no column {', '.join(absent)}")
        fields = itemgetter(*(names.index(field) if field in names else len(names) for field in ScoreRow._fields))
        rows = []
        for record in reader:
            if len(record) != len(names):
                raise ValueError(f"line {reader.line_num} is incomplete")
            rows.append(_score(fields([*record, ""]), reader.line_num))
    return _without_repeats(rows)


def _status(folder: Path) -> tuple[Status, str]:
    """Status and reason; the newest of several status files counts (a failed cell that was run again)."""
    found: tuple[float, Status, str] | None = None
    for name, status in _STATUS_FILES:
        try:
            written = (folder / name).stat().st_mtime
            text = (folder / name).read_text(encoding="utf-8", errors="replace")
        except OSError:
            continue
        if found is None or written > found[0]:
            found = (written, status, "" if status == "done" else _first_line(text))
    if found is None:
        return "unfinished", "running, or killed"
    return found[1], found[2] or ("" if found[1] == "done" else "no reason was written")


def _read_facts(folder: Path, status: Status, problems: list[str]) -> dict[str, Any]:
    path = folder / "cell.json"
    try:
        facts = json.loads(path.read_text(encoding="utf-8"))
        if not isinstance(facts, dict):
            raise ValueError("not a JSON object")
    except FileNotFoundError:
        if status == "done":
            problems.append("cell.json is missing")
        return {}
    except (OSError, ValueError) as error:
        # A run that was killed while writing is unfinished, not damaged.
        if status == "done":
            problems.append(f"could not read cell.json: {_first_line(str(error))}")
        return {}
    if status == "done":
        absent = [key for key in ("config", "results_version", "kind") if key not in facts]
        if absent:
            problems.append(f"cell.json has no {', '.join(absent)}")
    return facts


def _mapping(facts: Mapping[str, Any], key: str) -> dict[str, Any]:
    value = facts.get(key)
    return dict(value) if isinstance(value, dict) else {}


def _first_line(text: str) -> str:
    return next((line.strip() for line in text.splitlines() if line.strip()), "")


def _score(texts: Sequence[str], line: int) -> ScoreRow:
    """A row from the texts of its fields, in their order; missing ones are empty."""
    metric, value, error, n, split, tau, kappa, draws, better, unit, status, note = texts
    try:
        return ScoreRow(
            metric,
            _number(value),
            _number(error),
            _count(n) or 0,
            split or "test",
            _count(tau),
            _count(kappa),
            _count(draws),
            better,
            unit,
            status or "ok",
            note,
        )
    except ValueError as problem:
        raise ValueError(f"line {line}: {problem}") from None


def _number(text: str) -> float:
    try:
        return float(text) if text else math.nan  # pandas writes NaN as an empty field
    except ValueError:
        raise ValueError(f"{text!r} is not a number") from None


@cache
def _count(text: str) -> int | None:
    value = math.nan if text == "None" else _number(text)
    return None if math.isnan(value) else int(value)


def _without_repeats(rows: Sequence[ScoreRow]) -> tuple[ScoreRow, ...]:
    """Drops a score that appears twice with the same number of draws; raises ValueError if the values differ."""
    seen: dict[tuple[Column, int | None], ScoreRow] = {}
    for row in rows:
        key = (row.column, row.draws)
        first = seen.setdefault(key, row)
        same = first.value == row.value or (math.isnan(first.value) and math.isnan(row.value))
        if first is not row and not same:
            raise ValueError(f"{row.column.label} appears twice with different values")
    return tuple(seen.values())
