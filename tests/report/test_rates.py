"""The learned dropout rates of a report."""

from __future__ import annotations

import json

import pytest

from bnn_runner.errors import UserError
from bnn_runner.report.rates import rates_table
from bnn_runner.report.read_cells import find_cells
from bnn_runner.report.tables import build


def test_rates_are_means_over_seeds_next_to_points_and_steps(write_cell):
    """Planted bugs: steps without the last, smaller batch; epochs for steps; a row without rates listed."""
    write_cell("map", 0, hash8="0000000a")
    for seed, rate in enumerate((0.1, 0.3)):
        folder = write_cell("concrete_dropout", seed, config={"schedule.epochs": 20, "schedule.batch_size": 50})
        facts = json.loads((folder / "cell.json").read_text())
        facts["report"] = {"rates": {"hidden.0": rate, "out": 0.2}}
        (folder / "cell.json").write_text(json.dumps(facts))
        (folder / "provenance.json").write_text(json.dumps({"training_points": 120}))
    grid = rates_table(build(find_cells(write_cell.outputs)))
    [line] = grid.lines
    assert dict(zip(grid.words, line.words, strict=True))["steps"] == "60"
    assert grid.heads == ("hidden.0", "out") and [e.mean for e in line.entries if e] == pytest.approx([0.2, 0.2])


def test_a_report_without_rates_says_so(write_cell):
    write_cell("map", 0)
    with pytest.raises(UserError, match="--rates requires"):
        rates_table(build(find_cells(write_cell.outputs)))
