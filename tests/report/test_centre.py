"""The differences of posteriors from their own centres."""

from __future__ import annotations

import math

from bnn_runner.cli.report import main
from bnn_runner.report.centre import centre_differences
from bnn_runner.report.read_cells import find_cells
from bnn_runner.report.tables import build

MORE = {"better": "higher", "unit": "nats per point"}


def scores(own, centre, error):
    """Rows of a cell: a paired difference with its error over test points, and an rmse without one."""
    return [
        {"metric": "marginal_loglik", "value": own, **MORE},
        {"metric": "centre_marginal_loglik", "value": centre, **MORE},
        {"metric": "marginal_loglik_minus_centre", "value": own - centre, "standard_error": error, **MORE},
        ("rmse", 2 + own),
        ("centre_rmse", 2.0),
    ]


def test_differences_are_from_the_own_centre_seed_by_seed(write_cell):
    """Planted bugs: another row's centre; unpaired; a metric without a centre; a star at one seed."""
    for seed, shift in enumerate((0.0, 0.01, 0.02, 0.1)):
        write_cell("laplace", seed, scores(-0.5 + shift, -0.3 + shift, 0.04))
        write_cell("ensemble", seed, scores(-0.5 + 3 * shift, -0.3, 0.004))
    write_cell("laplace_kfac", 0, scores(-0.5, -0.3, 0.15))
    write_cell("map", 0, [{"metric": "marginal_loglik", "value": -0.3, **MORE}])
    grid = centre_differences(build(find_cells(write_cell.outputs)))
    lines = {line.words[2]: line for line in grid.lines}
    assert set(lines) == {"laplace", "ensemble", "laplace_kfac"} and grid.heads[0].startswith("Δ marginal_loglik")
    first = {name: line.entries[0] for name, line in lines.items()}
    assert math.isclose(first["laplace"].mean, -0.2) and first["laplace"].standard_error < 1e-12
    assert math.isclose(first["ensemble"].mean, -0.2 + 0.13 * 3 / 4) and first["ensemble"].n == 4
    assert first["ensemble"].standard_error > 0.01 and first["laplace_kfac"].n == 1
    assert not lines["laplace_kfac"].starred
    assert math.isclose(lines["ensemble"].entries[1].mean, first["ensemble"].mean - 0.3)


def test_the_command_writes_the_table_and_says_what_to_run_without_one(write_cell, nine_cells, capsys):
    assert main(["--output-dir", str(nine_cells.outputs), "--centre", "--no-figure"]) == 2
    assert "method=laplace" in capsys.readouterr().err
    write_cell("laplace_kfac", 0, scores(-0.5, -0.3, 0.15))
    assert main(["--output-dir", str(nine_cells.outputs), "--centre", "--no-figure"]) == 0
    text = (nine_cells.outputs / "results" / "comparison.md").read_text()
    assert "posterior minus its centre" in text and "-0.2000" in text
