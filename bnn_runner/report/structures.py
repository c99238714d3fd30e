"""The evidence of one network under several structures of the curvature, as differences from the full one."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from bnn_runner.report import style
from bnn_runner.report.grid import Grid, Line
from bnn_runner.report.looks import Look, identity, looks
from bnn_runner.report.numbers import number
from bnn_runner.report.read_cells import ScoreRow
from bnn_runner.report.scatter import error_of, row_label
from bnn_runner.report.section import Section
from bnn_runner.report.tables import Entry, Row, Table, aggregate

if TYPE_CHECKING:
    from matplotlib.axes import Axes

ORDER = ("full", "block", "kfac", "ekfac", "low_rank", "diag")
NESTED = ("full", "block", "diag")
"""Each leaves out entries of the one before it. log det is largest for the last (Fischer's inequality), so that at one
set of weights and one precision, and hence also at the best precision of each, the evidence decreases."""
_FREE = ("method.structure", "method.rank", "method.predict")
_ROUNDING = 1e-6  # relative; two structures may be the same matrix


@dataclass(frozen=True)
class StructureRow:
    """One structure: its log evidence, and the paired difference from the first of its block, in nats."""

    row: Row
    structure: str
    evidence: Entry
    difference: Entry


@dataclass(frozen=True)
class Block:
    """The structures of the same networks, in the order `ORDER`."""

    title: str
    rows: tuple[StructureRow, ...]

    @property
    def reference(self) -> str:
        return self.rows[0].structure

    def order(self) -> str:
        """How often the nested structures are in their order, in words; empty with fewer than two of them."""
        nested = [r for name in NESTED for r in self.rows if r.structure == name]
        seeds = sorted(set.intersection(*(set(r.row.group.done) for r in nested))) if len(nested) > 1 else []
        if not seeds:
            return ""
        values = [[_nats(r.row, seed) for r in nested] for seed in seeds]
        kept = sum(all(_not_below(a, b) for a, b in itertools.pairwise(line)) for line in values)
        return f"{' ≥ '.join(r.structure for r in nested)} holds on {kept} of {len(seeds)} seeds."


def blocks(table: Table) -> list[Block]:
    """Blocks of rows that differ only in the structure, of two structures or more."""
    found: dict[tuple[object, ...], dict[str, Row]] = {}
    for row in table.rows:
        cells = row.group.done.values()
        facts = {(c.evidence.get("structure"), c.evidence.get("evidence_over"), c.evidence.get("mode")) for c in cells}
        if len(facts) != 1 or not all(math.isfinite(float(c.evidence.get("evidence_nats", "nan"))) for c in cells):
            continue
        ((structure, over, mode),) = facts
        if structure not in ORDER:
            continue
        key = row.group.key
        same = tuple(s for s in key.settings if s[0] not in _FREE and not s[0].startswith("eval."))
        found.setdefault((key.data_key, key.model, over, mode, same), {}).setdefault(str(structure), row)
    return [_block(str(over), rows) for (_, _, over, *_), rows in found.items() if len(rows) > 1]


def grids(table: Table) -> list[Grid]:
    """One table per block."""
    made = []
    for block in blocks(table):
        heads = ("log evidence [nats] ↑", f"difference from {block.reference} [nats] ↑")
        lines = tuple(
            Line((r.structure, row_label(r.row), str(r.row.n)), (r.evidence, r.difference), r.row.n) for r in block.rows
        )
        note = f"Differences are paired by seed. {block.order()}".strip()
        made.append(Grid(f"{block.title}: evidence by structure", ("structure", "method", "n"), 2, heads, lines, note))
    return made


def figure(table: Table, path: Path) -> Path | None:
    """Bars of the differences, one panel per block; error bars are paired standard errors. None without a block."""
    from matplotlib.figure import Figure

    found, look = blocks(table), looks(table)
    if not found:
        return None
    heights = [1.3 + 0.42 * len(block.rows) for block in found]
    labels = [[_label(r) for r in block.rows] for block in found]
    left = 0.3 + 0.068 * max(len(line) for texts in labels for text in texts for line in text.split("\n"))
    width = left + 4.6
    sized = Figure(figsize=(width, sum(heights)))
    parts = sized.subfigures(len(found), 1, height_ratios=heights, hspace=0, squeeze=False)[:, 0]
    for part, block, texts, height in zip(parts, found, labels, heights, strict=True):
        (ax,) = part.subplots(1, 1, squeeze=False).flat
        style.tidy(ax)
        _bars(ax, block, [look[identity(r.row)] for r in block.rows], texts)
        part.suptitle(block.title, fontsize=10, fontweight="bold", y=1 - 0.1 / height, va="top")
        edges = {"left": left, "right": 0.25, "top": 0.45, "bottom": 0.75}
        style.place(part, (width, height), 1, 1, **edges, across=0.0, down=0.0)
    return style.save(sized, path)


def _bars(ax: Axes, block: Block, own: Sequence[Look], labels: Sequence[str]) -> None:
    for i, (r, its) in enumerate(zip(block.rows, own, strict=True)):
        ax.barh(i, r.difference.mean, height=0.6, color=its.colour, alpha=0.85)
        ax.errorbar([r.difference.mean], [i], xerr=[error_of(r.difference)], color=style.INK, capsize=3, lw=1.2)
    ax.axvline(0, color=style.INK, lw=0.8)
    ax.set_yticks(range(len(labels)), labels)
    ax.set_ylim(len(labels) - 0.5, -0.5)
    ax.margins(x=0.08)
    ax.use_sticky_edges = False
    ax.locator_params(axis="x", nbins=5)
    ax.set_xlabel(f"log evidence − that of {block.reference} [nats]\n(error bars: ±1 standard error, paired by seed)")


def _label(r: StructureRow) -> str:
    return f"{row_label(r.row)} ({r.structure})\n{number(r.evidence.mean, r.evidence.standard_error)} nats"


def _block(over: str, rows: Mapping[str, Row]) -> Block:
    ordered = [(name, rows[name]) for name in ORDER if name in rows]
    reference = ordered[0][1]
    made = []
    for name, row in ordered:
        shared = [seed for seed in row.group.done if seed in reference.group.done]
        own = [_nats(row, seed) for seed in row.group.done]
        paired = [_nats(row, seed) - _nats(reference, seed) for seed in shared]
        made.append(StructureRow(row, name, _entry(own), _entry(paired)))
    key = reference.group.key
    return Block(f"{key.data} · {key.model} · evidence over {over}", tuple(made))


def _nats(row: Row, seed: int) -> float:
    return float(row.group.done[seed].evidence["evidence_nats"])


def _not_below(a: float, b: float) -> bool:
    return a >= b - _ROUNDING * max(1.0, abs(a), abs(b))


def _entry(values: Sequence[float]) -> Entry:
    return aggregate([ScoreRow("evidence_nats", value, better="higher", unit="nats") for value in values])


SECTION = Section(
    "",
    "",
    lambda request: grids(request.table),
    lambda request, path: figure(request.table, path),
    stem="structures",
)
