"""Which cells belong to one row: those that differ only in the seed and in settings that change no number.

Every other field of the configuration, the results version, and whether a run was shortened, separates rows; a field
that distinguishes rows becomes a column.
"""

from __future__ import annotations

import json
import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

from bnn_runner.config.keys import list_of
from bnn_runner.errors import UserError
from bnn_runner.report.paths import short_paths
from bnn_runner.report.read_cells import CellRecord

ABSENT = "—"
CONTENT = "data.content"
"""Field of a row: the beginning of a hash of the user's own files."""
_NUMBER = re.compile(r"((?<![\w.])-?\d+(?:\.\d+)?(?:e[+-]?\d+)?|\d+)", re.IGNORECASE)


@cache
def is_neutral(field: str) -> bool:
    """Whether a dotted configuration field may differ within a row: the seed, and fields outside a cell's id.

    `metric` is one of these: metrics only read saved evaluations.
    """
    return field == "seed" or list_of(field) == "never"


def value_text(value: Any) -> str:
    """One text per value: 1 and 1.0 give the same text, and lists and null have one form."""
    if value is None:
        return "null"
    if isinstance(value, bool | str):
        return str(value).lower() if isinstance(value, bool) else value
    if isinstance(value, int | float):
        return _number_text(value)
    return json.dumps(value, sort_keys=True, default=str)


@cache
def _number_text(value: float) -> str:
    short = f"{value:g}"
    return short if float(short) == value else repr(value)


def by_size(text: str) -> tuple[tuple[int, float, str], ...]:
    """Natural order of settings: numbers by size, also within words and lists ([20] before [100]), then words."""
    pieces = (piece for piece in _NUMBER.split(text.replace("]", "")) if piece)
    return tuple((0, float(p), "") if _NUMBER.fullmatch(p) else (1, 0.0, p) for p in pieces)


@dataclass(frozen=True)
class GroupKey:
    """What all cells of a row share. Hashable; `settings` are the (field, text) pairs, sorted."""

    data: str
    model: str
    method: str
    results_version: int | None
    shortened: bool
    settings: tuple[tuple[str, str], ...]

    @property
    def values(self) -> dict[str, str]:
        return dict(self.settings)

    @property
    def data_key(self) -> tuple[object, ...]:
        """Rows with the same key were scored on the same points by the same code, and may be compared."""
        return (self.data, self.results_version, tuple(s for s in self.settings if s[0].startswith("data.")))


def key_of(cell: CellRecord) -> GroupKey:
    """The row of a cell whose configuration is known."""
    settings = [(f, value_text(v)) for f, v in cell.config.items() if not is_neutral(f)]
    if cell.content:  # the same data.path, but another version of the file
        settings.append((CONTENT, cell.content[:8]))
    shortened = cell.shortened is not None
    return GroupKey(cell.data, cell.model, cell.method, cell.results_version, shortened, tuple(sorted(settings)))


@dataclass(frozen=True)
class Group:
    """The cells of one row: the finished ones by seed, and the others."""

    key: GroupKey
    done: Mapping[int, CellRecord]
    others: tuple[CellRecord, ...]


def group_cells(cells: Sequence[CellRecord]) -> tuple[list[Group], list[CellRecord]]:
    """Rows in the order of data, model and method; and the cells without a row.

    A cell that stopped before it wrote its configuration joins the row of its data, model and method if there is just
    one. Raises `UserError` for two finished cells of one row and seed.
    """
    done: dict[GroupKey, dict[int, list[CellRecord]]] = defaultdict(lambda: defaultdict(list))
    others: dict[GroupKey, list[CellRecord]] = defaultdict(list)
    homeless: list[CellRecord] = []
    for cell in cells:
        if cell.status == "done":
            done[key_of(cell)][cell.seed].append(cell)
        elif cell.status != "damaged" and cell.config:
            others[key_of(cell)].append(cell)
        else:
            homeless.append(cell)
    _refuse_duplicates(done)
    _unshortened_first(done, others)

    keys = set(done) | set(others)
    loose: list[CellRecord] = []
    for cell in homeless:
        rows = [k for k in keys if (k.data, k.model, k.method) == (cell.data, cell.model, cell.method)]
        if len(rows) == 1:
            others[rows[0]].append(cell)
        elif not rows and cell.status in ("failed", "interrupted"):
            others[GroupKey(cell.data, cell.model, cell.method, cell.results_version, False, ())].append(cell)
        else:
            loose.append(cell)

    def order(key: GroupKey) -> tuple[object, ...]:
        settings = tuple((field, by_size(text)) for field, text in key.settings)
        return (key.data, key.model, key.method != "map", key.method, str(key.results_version), key.shortened, settings)

    groups = [
        Group(key, {seed: found[0] for seed, found in sorted(done[key].items())}, tuple(others[key]))
        for key in sorted(set(done) | set(others), key=order)
    ]
    return groups, loose


def _refuse_duplicates(done: Mapping[GroupKey, Mapping[int, Sequence[CellRecord]]]) -> None:
    problems = []
    for seeds in done.values():
        for seed, found in seeds.items():
            if len(found) > 1:
                paths = " and ".join(str(c.path) for c in found)
                problems.append(
                    f"Each seed of a configuration must have one cell; got {paths} for seed {seed}. Delete or move one "
                    "of these folders, or run one of the two sweeps with another output_dir."
                )
    if problems:
        raise UserError(*problems)


def _unshortened_first(
    done: Mapping[GroupKey, Mapping[int, Sequence[CellRecord]]], others: dict[GroupKey, list[CellRecord]]
) -> None:
    """A failed or cut run may or may not have been shortened: it joins the row with finished cells."""
    for key in list(others):
        if key in done:
            continue
        twin = GroupKey(key.data, key.model, key.method, key.results_version, not key.shortened, key.settings)
        if twin in done:
            others[twin] = others.get(twin, []) + others.pop(key)


def distinguishing_fields(groups: Sequence[Group]) -> dict[str, list[str]]:
    """Extra columns: name -> one text per group, for every field that distinguishes rows of one data set and model.

    A group's choice (`schedule`) represents all of its fields; a field is a column of its own only if it differs under
    one choice.
    """
    columns: dict[str, list[str]] = {}
    choices = [_choices(g) for g in groups]
    for name in sorted({c for found in choices for c in found}):
        texts = [found.get(name, ABSENT) for found in choices]
        known_by = [i for i, found in enumerate(choices) if name in found]
        if _differs([(groups[i].key.data, groups[i].key.model) for i in known_by], [texts[i] for i in known_by]):
            columns[name] = texts
    fields = sorted({f for g in groups for f, _ in g.key.settings})
    values = [g.key.values for g in groups]
    for name in fields:
        part = name.split(".", 1)[0]
        known = [bool(v) for v in values]  # a row of failures may have no configuration
        texts = [v.get(name, ABSENT) for v in values]
        within: list[tuple[object, ...]] = [
            (g.key.data, g.key.model) + ((g.key.method,) if part == "method" else ()) for g in groups
        ]
        if part in columns:
            within = [(*w, columns[part][i]) for i, w in enumerate(within)]
        # A field that a method lacks (a rule it does not use) distinguishes cells of one method, but not methods.
        having = [i for i, v in enumerate(values) if name in v]
        kept = [i for i, k in enumerate(known) if k]
        same_method = [(*within[i], g.key.method) for i, g in enumerate(groups)]
        lacking = _differs([same_method[i] for i in kept], [str(name in values[i]) for i in kept])
        if lacking or _differs([within[i] for i in having], [texts[i] for i in having]):
            columns[name] = texts
    versions_of_results = [ABSENT if g.key.results_version is None else str(g.key.results_version) for g in groups]
    if len(set(versions_of_results) - {ABSENT}) > 1:
        columns["results_version"] = versions_of_results
    return {name: short_paths(texts) for name, texts in columns.items()}


def _choices(group: Group) -> dict[str, str]:
    """Group -> choice, without data, model and method, which already are columns."""
    agreed: dict[str, set[str]] = defaultdict(set)
    for cell in (*group.done.values(), *(c for c in group.others if c.config)):
        for name, choice in cell.choices.items():
            if name not in ("data", "model", "method", "metric", "experiment", "logger") and not name.startswith(
                "hydra"
            ):
                agreed[name].add(choice)
    return {name: "/".join(sorted(found)) for name, found in agreed.items()}


def _differs(within: Sequence[tuple[object, ...]], texts: Sequence[str]) -> bool:
    seen: dict[tuple[object, ...], str] = {}
    return any(seen.setdefault(place, text) != text for place, text in zip(within, texts, strict=True))
