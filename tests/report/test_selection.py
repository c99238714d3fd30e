"""Selection of settings on validation data, seed by seed."""

from __future__ import annotations

import pytest

from bnn_runner.cli.report import main
from bnn_runner.errors import UserError
from bnn_runner.report.columns import Column
from bnn_runner.report.read_cells import find_cells
from bnn_runner.report.selection import selected_by_validation
from bnn_runner.report.tables import build


def _write(write_cell, method, seed, rate, val, test, **more):
    scores = [
        {"metric": "marginal_loglik", "value": test, "better": "higher"},
        {"metric": "marginal_loglik", "value": val, "better": "higher", "split": "val"},
    ]
    config = {} if rate is None else {"method.rate": rate}
    name = f"{seed}{str(rate).replace('.', '')}{len(method)}".ljust(8, "0")[:8].replace("N", "a").replace("one", "aaa")
    write_cell(method, seed, scores if val is not None else scores[:1], config=config, hash8=name, **more)


def test_each_seed_has_its_best_value_by_validation_and_not_by_test(write_cell):
    """Planted bugs: the test score decides; one value for all seeds; other methods dropped; rows of two rates."""
    for seed, (low, high) in enumerate([(-1.0, -2.0), (-3.0, -1.5), (-1.0, -1.2)]):
        _write(write_cell, "mc_dropout", seed, 0.005, low, -10.0)
        _write(write_cell, "mc_dropout", seed, 0.05, high, -20.0)
        _write(write_cell, "map", seed, None, -9.0, -5.0)
    cells, notes = selected_by_validation(find_cells(write_cell.outputs), ["method.rate"])
    table = build(cells)
    rows = {row.group.key.method: row for row in table.rows}
    assert {name: row.n for name, row in rows.items()} == {"map": 3, "mc_dropout": 3}
    assert rows["mc_dropout"].entries[Column("marginal_loglik")].mean == pytest.approx((-10 - 20 - 10) / 3)
    assert notes == [
        "yacht/mc_dropout: method.rate selected on the validation part of each seed, among 2 values: 0.005 (2 of 3), "
        "0.05 (1 of 3)."
    ]


def test_wrong_requests_are_refused(write_cell, capsys):
    """Planted bugs: an unknown field selects silently; runs without a validation part compare as minus infinity."""
    _write(write_cell, "mc_dropout", 0, 0.005, None, -10.0)
    _write(write_cell, "mc_dropout", 0, 0.05, -1.0, -10.0)
    with pytest.raises(UserError, match=r"requires a validation log-likelihood .*val_fraction"):
        selected_by_validation(find_cells(write_cell.outputs), ["method.rate"])
    assert main(["--output-dir", str(write_cell.outputs), "--select", "method.rat"]) == 2
    assert "method.rate" in capsys.readouterr().err
