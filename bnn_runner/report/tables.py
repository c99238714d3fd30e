"""From cells to one table: mean ± standard error over seeds, with everything that is missing still visible.

Nothing is averaged away: a NaN seed makes its entry NaN, a failed seed is counted in its row, and a row with failed
seeds is never marked as the best.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from statistics import median, quantiles

from bnn_runner.report.columns import AT_DRAWS, Column, is_companion, select_columns
from bnn_runner.report.differences import Measured
from bnn_runner.report.epochs import without_scheduled
from bnn_runner.report.grouping import ABSENT, CONTENT, Group, distinguishing_fields, group_cells
from bnn_runner.report.marks import footnotes, is_biased, letters, mark_text
from bnn_runner.report.paths import without_folders
from bnn_runner.report.point_scores import read_points
from bnn_runner.report.read_cells import CellRecord, ScoreRow
from bnn_runner.report.separation import Candidate, Outcome, compare, detectable, separated

NOT_CONVERGED = "†"
BIASED = f"{NOT_CONVERGED} not converged in the number of draws: the value is biased"
SHORTENED = "‡"


@dataclass(frozen=True)
class Entry:
    """One metric of one row over its finished seeds.

    `mean`, `standard_error` (s/√n with n − 1 in s; NaN at n = 1) and `quartiles` (first, median, third; linear
    between the sorted values) are over the n seeds for which the score applies: one NaN seed makes them NaN.
    `nonfinite` counts NaN and ±inf, `not_applicable` the seeds with n/a, `absent` the finished seeds without the score.
    `points_error` is the standard error of one seed over its test points (the root of the mean square over seeds).
    """

    mean: float
    standard_error: float
    n: int
    nonfinite: int = 0
    not_applicable: int = 0
    absent: int = 0
    marked: bool = False
    better: str = ""
    unit: str = ""
    quartiles: tuple[float, float, float] = (math.nan, math.nan, math.nan)
    points_error: float = math.nan


@dataclass(frozen=True)
class Row:
    """One line of the table. `missing` maps each seed that other rows have, but not this one, to the reason."""

    group: Group
    extra: dict[str, str]
    entries: dict[Column, Entry]
    missing: dict[int, str] = field(default_factory=dict)

    @property
    def n(self) -> int:
        """Finished seeds."""
        return len(self.group.done)

    def count(self, status: str) -> int:
        """How many cells of this row are `status` (failed, cut, unfinished, damaged)."""
        return sum(c.status == status for c in self.group.others)

    def settings(self, fields: Sequence[str] | None = None) -> list[str]:
        """The settings that distinguish the row, for labels: `epochs=40`; of `fields`, or all that it has."""
        names = self.extra if fields is None else fields
        return [f"{name.split('.')[-1]}={self.extra[name]}" for name in names if self.extra[name] != ABSENT]

    @property
    def marks(self) -> Counter[str]:
        """Kinds of marks (`report.marks`), each with the number of finished seeds that have it."""
        return Counter(name for cell in self.group.done.values() for name in cell.marks)

    @property
    def kind(self) -> str:
        kinds = [c.kind for c in (*self.group.done.values(), *self.group.others) if c.kind]
        return kinds[0] if kinds else ""

    @property
    def name(self) -> str:
        """Data / model / method and the settings that distinguish the row."""
        key = self.group.key
        more = [f"{k}={v}" for k, v in self.extra.items()]
        return " ".join([f"{key.data}/{key.model}/{key.method}", *more])


@dataclass(frozen=True)
class Table:
    """Rows, shown columns, names of the extra columns, and the notes below the table."""

    rows: list[Row]
    columns: list[Column]
    extra: list[str]
    notes: list[str]
    provenance: str

    @cached_property
    def letters(self) -> dict[str, str]:
        """Kind of mark -> its letter in this table."""
        return letters(row.marks for row in self.rows)

    def named(self, row: Row, name: str) -> str:
        """A name of a row with its marks: that of a shortened training, and the letters."""
        return name + SHORTENED * row.group.key.shortened + mark_text(row.marks, self.letters)

    @cached_property
    def comparisons(self) -> dict[Column, list[Outcome]]:
        """For each column, the best row of each data set against its rivals (see `separation`).

        Diagnostics have none, and neither has a data set with an entry that is not converged: its value is biased. A
        row with failed seeds is never the best, because its other seeds are a selection.
        """
        places: dict[tuple[object, ...], list[int]] = {}
        for i, row in enumerate(self.rows):
            places.setdefault(row.group.key.data_key, []).append(i)
        found: dict[Column, list[Outcome]] = {}
        for column in self.columns:
            for group in () if is_companion(column.metric) else places.values():
                entries = {i: self.rows[i].entries[column] for i in group if column in self.rows[i].entries}
                usable = {i: e for i, e in entries.items() if e.n and math.isfinite(e.mean) and not e.not_applicable}
                if any(e.marked for e in usable.values()) or not usable:
                    continue
                sign = {"higher": 1.0, "lower": -1.0}.get(next(iter(usable.values())).better, 0.0)
                candidates = [_candidate(i, self.rows[i], column) for i in usable]
                if (outcome := compare(candidates, sign)) is not None:
                    found.setdefault(column, []).append(outcome)
        return found

    @cached_property
    def _winners(self) -> set[tuple[Column, int]]:
        outcomes = [(column, o) for column, found in self.comparisons.items() for o in found]
        kept = separated([o for _, o in outcomes])
        return {(column, o.winner) for (column, o), there in zip(outcomes, kept, strict=True) if there}

    def best(self, column: Column) -> set[int]:
        """Indices of the rows that are bold: the best of its data set, separated from every rival (`separation`)."""
        return {place for found, place in self._winners if found == column}

    def detectable(self, column: Column) -> float:
        """The smallest difference from the second best row that would surely be bold: the median over data sets.

        NaN if no difference would be, because too few seeds have run or an error is not known.
        """
        count = sum(map(len, self.comparisons.values()))
        found = [detectable(o, count) for o in self.comparisons.get(column, ())]
        usable = [d for d in found if not math.isnan(d)]
        return median(usable) if usable else math.nan


def build(cells: Sequence[CellRecord], metrics: str | None = None) -> Table:
    """The table of these cells.

    `metrics` as in `columns.select_columns`. Raises `UserError` for duplicated cells and unknown metrics.
    """
    groups, loose = group_cells(cells)
    extra = without_scheduled(distinguishing_fields(groups), groups)
    seeds_of: dict[str, set[int]] = {}
    for group in groups:
        seen = seeds_of.setdefault(group.key.data, set())
        seen.update(group.done, (c.seed for c in group.others))
    for cell in loose:
        if cell.data in seeds_of and cell.seed >= 0:
            seeds_of[cell.data].add(cell.seed)
    finished = [cell for group in groups for cell in group.done.values()]
    known = {column for cell in finished for column in cell.main_scores if not _same_at_fewer_draws(column)}
    columns = select_columns(list(known), metrics)
    rows = [
        row_of(group, {name: texts[i] for name, texts in extra.items()}, columns, seeds_of[group.key.data])
        for i, group in enumerate(groups)
    ]
    columns = [c for c in columns if any(c in row.entries for row in rows)]
    return Table(rows, columns, list(extra), _notes(rows, columns, loose), _provenance(cells))


def row_of(group: Group, extra: dict[str, str], columns: Sequence[Column], seeds: Iterable[int] = ()) -> Row:
    """The row of a group; `seeds` are the ones it should have."""
    return Row(group, extra, _entries(group, columns), _missing(group, seeds))


def _same_at_fewer_draws(column: Column) -> bool:
    # One column does not fit S/4, S/2 and S; metrics.csv and the run's joint figure have them.
    return column.metric.endswith(AT_DRAWS)


def aggregate(scores: Sequence[ScoreRow], absent: int = 0) -> Entry:
    """One entry from the same score of several seeds."""
    counted = [s for s in scores if s.status != "n/a"]
    values = [s.value for s in counted]
    nonfinite = sum(not math.isfinite(v) for v in values)
    n = len(values)
    mean = math.fsum(values) / n if n and not nonfinite else _nonfinite_mean(values)
    error = math.nan
    if n > 1 and not nonfinite:
        error = math.sqrt(math.fsum((v - mean) ** 2 for v in values) / (n - 1) / n)
    return Entry(
        mean,
        error,
        n,
        nonfinite,
        not_applicable=len(scores) - n,
        absent=absent,
        marked=any(s.status not in ("ok", "n/a", "not finite") for s in scores),
        better=next((s.better for s in scores if s.better), ""),
        unit=next((s.unit for s in scores if s.unit), ""),
        quartiles=_quartiles(values) if n and not nonfinite else (math.nan, math.nan, math.nan),
        points_error=math.sqrt(math.fsum(s.standard_error**2 for s in counted) / n)
        if n and not nonfinite
        else math.nan,
    )


def _quartiles(values: Sequence[float]) -> tuple[float, float, float]:
    if len(values) == 1:
        return (values[0], values[0], values[0])
    first, median, third = quantiles(values, n=4, method="inclusive")
    return first, median, third


def _nonfinite_mean(values: Sequence[float]) -> float:
    infinite = {v for v in values if math.isinf(v)}
    if any(math.isnan(v) for v in values) or len(infinite) != 1:
        return math.nan
    return infinite.pop()


def _entries(group: Group, columns: Sequence[Column]) -> dict[Column, Entry]:
    entries = {}
    for column in columns:
        found = [cell.main_scores[column] for cell in group.done.values() if column in cell.main_scores]
        if found:
            entries[column] = aggregate(found, absent=len(group.done) - len(found))
    return entries


def _missing(group: Group, seeds: Iterable[int]) -> dict[int, str]:
    why: dict[int, str] = {}
    for cell in group.others:
        why[cell.seed] = cell.status
    return {seed: why.get(seed, "not run") for seed in sorted(seeds) if seed not in group.done}


def _candidate(place: int, row: Row, column: Column) -> Candidate:
    cells = {seed: cell for seed, cell in row.group.done.items() if column in cell.main_scores}
    return Candidate(
        place, {s: measured(c, column) for s, c in cells.items()}, not (row.count("failed") or is_biased(row.marks))
    )


def measured(cell: CellRecord, column: Column) -> Measured:
    """A score of a cell with its errors; its points are read when they are asked for."""
    score = cell.main_scores[column]
    return Measured(score.value, score.standard_error, lambda: read_points(cell.path, column.key))


def _notes(rows: Sequence[Row], columns: Sequence[Column], loose: Sequence[CellRecord]) -> list[str]:
    notes = []
    if any(e.marked for row in rows for e in row.entries.values()):
        notes.append(f"{BIASED}.")
    counts = [(row.name, row.marks, row.n) for row in rows]
    notes += footnotes(counts, letters(c for _, c, _ in counts))
    for row in rows:
        if row.group.key.shortened:
            notes.append(f"{SHORTENED} {row.name}: training was shortened by the time limit ({_shortening(row)}).")
    for row in rows:
        if row.missing:
            by_reason: dict[str, list[str]] = {}
            for seed, why in row.missing.items():
                by_reason.setdefault(why, []).append(str(seed))
            shown = "; ".join(f"{', '.join(seeds)} ({why})" for why, seeds in by_reason.items())
            notes.append(f"{row.name}: missing seeds {shown}.")
    for row in rows:
        notes += [_stopped(c) for c in row.group.others if c.status in ("failed", "interrupted")]
    everything = [c for row in rows for c in row.group.others] + list(loose)
    notes += [_stopped(c) for c in loose if c.status in ("failed", "interrupted")]
    notes += [f"damaged and left out: {c.name}: {c.reason}." for c in everything if c.status == "damaged"]
    unfinished = [c.name for c in everything if c.status == "unfinished"]
    if unfinished:
        notes.append(f"not finished (running, or killed): {', '.join(unfinished)}.")
    reasons_of: dict[Column, set[str]] = {column: set() for column in columns}
    for row in rows:
        for cell in row.group.done.values():
            for s in cell.scores:
                if s.status == "n/a" and s.note and s.column in reasons_of:
                    reasons_of[s.column].add(s.note)
    for column, reasons in reasons_of.items():
        notes += [f"n/a: {column.label}: {reason.rstrip('.')}." for reason in sorted(reasons)]
    contents: dict[tuple[str, str], set[str]] = {}
    for row in rows:
        if CONTENT in row.group.key.values:
            path = row.group.key.values.get("data.path", "")
            contents.setdefault((row.group.key.data, path), set()).add(row.group.key.values[CONTENT])
    for (data, path), found in contents.items():
        if len(found) > 1:
            notes.append(
                f"data={data} has {len(found)} versions of {Path(path).name} ({CONTENT} {', '.join(sorted(found))}): "
                "their rows are separate and must not be compared. Run the older cells again."
            )
    versions_of_results = sorted(
        {row.group.key.results_version for row in rows if row.group.key.results_version is not None}
    )
    if len(versions_of_results) > 1:
        old = ", ".join(str(r) for r in versions_of_results[:-1])
        notes.append(
            f"Rows of results version {old} are outdated (the newest is {versions_of_results[-1]}) and must not be "
            "compared."
        )
    return [without_folders(note) for note in notes]


def _stopped(cell: CellRecord) -> str:
    return f"{cell.status.upper()} {cell.name}: {cell.reason}"


def _shortening(row: Row) -> str:
    seen: dict[str, set[str]] = {}
    for cell in row.group.done.values():
        for what, value in (cell.shortened or {}).items():
            if isinstance(value, list | tuple) and len(value) == 2:
                seen.setdefault(what, set()).add(f"{value[1]} of {value[0]}")
    changes = "; ".join(f"{what}: {', '.join(sorted(values))}" for what, values in seen.items())
    return changes or "see its cell.json"


def _provenance(cells: Sequence[CellRecord]) -> str:
    count = {s: sum(c.status == s for c in cells) for s in ("done", "failed", "interrupted", "unfinished", "damaged")}
    counts = ", ".join(f"{n} {status}" for status, n in count.items() if n)
    versions = ", ".join(sorted({c.version for c in cells if c.version})) or "unknown"
    versions_of_results = (
        ", ".join(sorted({str(c.results_version) for c in cells if c.results_version is not None})) or "unknown"
    )
    cells_word = "cell" if len(cells) == 1 else "cells"
    return f"{len(cells)} {cells_word} ({counts}); bnn_runner {versions}; results version {versions_of_results}."
