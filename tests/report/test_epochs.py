"""The epochs of every row, wherever a method trains further than the networks that others use."""

from __future__ import annotations

import csv
import io
import json

import bnn_runner
from bnn_runner.methods.bbb import BBB
from bnn_runner.methods.swag import SWAG
from bnn_runner.report.read_cells import find_cells
from bnn_runner.report.render import report_of, to_csv, to_markdown
from bnn_runner.report.tables import build
from bnn_runner.training.schedules import Schedule


def _cells(write_cell, **epochs_of):
    for i, (method, epochs) in enumerate(epochs_of.items()):
        folder = write_cell(method, 0, hash8=f"0000000{i}", config={"schedule.epochs": epochs[1]})
        facts = json.loads((folder / "cell.json").read_text())
        facts["epochs"] = dict(zip(("networks", "training", "own"), epochs, strict=True))
        (folder / "cell.json").write_text(json.dumps(facts))
    return build(find_cells(write_cell.outputs))


def test_a_table_with_a_method_that_trains_further_shows_the_epochs_of_all(write_cell):
    """Planted bugs: the fit's own epochs left out; one network's epochs for five; the schedule's epochs twice."""
    table = _cells(write_cell, map=(1, 10, 0), ensemble=(5, 10, 0), swag=(1, 5, 5), sgld=(2, 5, 5), bbb=(1, 0, 10))
    text = to_markdown(report_of(table))
    [grid] = report_of(table).grids
    assert grid.words == ("data", "model", "method", "epochs", "n") and "epochs of their training" in text
    shown = {line.words[2]: line.words[3] for line in grid.lines}
    assert shown == {"map": "10", "ensemble": "5 × 10", "swag": "5 + 5", "sgld": "2 × (5 + 5)", "bbb": "10"}
    rows = list(csv.DictReader(io.StringIO(to_csv(table))))
    assert {r["method"]: r["epochs"] for r in rows} == shown


def test_a_table_without_such_a_method_does_not(write_cell):
    """Planted bug: the column appears wherever there is an ensemble."""
    [grid] = report_of(_cells(write_cell, map=(1, 10, 0), ensemble=(5, 10, 0))).grids
    assert "epochs" not in grid.words and not grid.note


def test_a_run_writes_its_epochs(tmp_path):
    """Planted bug: the length of a chain, in units of the schedule's epochs, taken for epochs."""
    words = ["data=gap1d", "method=sgld", "method.chains=2", "method.length=1.5", "method.keep=10"]
    words += ["schedule.epochs=4", "data.num_train=20", "figures=false", "metric=marginal", f"output_dir={tmp_path}"]
    run = bnn_runner.run([*words, "eval.num_draws=10"], quiet=True)
    assert run.facts["epochs"] == {"networks": 2, "training": 4, "own": 6}
    schedule = Schedule(optimizer="adam", epochs=7, batch_size=1, lr=0.1)
    assert (BBB().own_epochs(schedule), BBB(epochs=3).own_epochs(schedule), SWAG().own_epochs(schedule)) == (7, 3, 40)
