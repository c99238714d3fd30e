"""Ensemble-equivalent sizes, from cells as runs leave them."""

import math

import pytest

from bnn_runner.cli.report import main
from bnn_runner.errors import UserError
from bnn_runner.report.equivalents import ensemble_equivalents, equivalent
from bnn_runner.report.read_cells import find_cells
from bnn_runner.report.tables import build

LOGLIK = {1: -0.50, 2: -0.40, 3: -0.35, 5: -0.31}
CALIBRATED = {"eval.calibrate": "temperature"}


@pytest.fixture
def ensembles(write_cell):
    """Two seeds of ensembles of 2, 3 and 5, MAP as 1, log-likelihoods ∓ 0.01; laplace half way from 2 to 3."""

    def row(method, value, place, **settings):
        for seed in (0, 1):
            score = {"metric": "marginal_loglik", "value": value + 0.01 * (2 * seed - 1), "better": "higher"}
            config = CALIBRATED | settings
            folder = write_cell(
                method, seed, [score], kind="classification", config=config, hash8=f"{place}000abcd", data="mnist"
            )
            (folder / "command.txt").write_text(f"bnn-run data=mnist method={method} method.size=5 seed={seed}\n")

    row("map", LOGLIK[1], 0)
    for place, size in enumerate((2, 3, 5), 1):
        row("ensemble", LOGLIK[size], place, **{"method.size": size})
    row("laplace", -0.375, 5)
    write_cell.row = row
    return write_cell


def grid_of(write_cell):
    return ensemble_equivalents(build(find_cells(write_cell.outputs)))


def test_an_ensemble_is_worth_its_size_and_others_lie_between(ensembles):
    """Planted bugs: the curve by order of folders; a band of standard errors; MAP left out."""
    grid = grid_of(ensembles)
    place = grid.words.index("method")
    found = [(line.words[place], [e.mean for e in line.entries[1:]]) for line in grid.lines]
    assert [round(v[0], 9) for name, v in found if name == "ensemble"] == [2, 3, 5]
    assert next(v for name, v in found if name == "map")[0] == 1
    laplace = next(v for name, v in found if name == "laplace")
    sd = 0.01 * math.sqrt(2)
    up = {size: value + sd for size, value in LOGLIK.items()}
    down = {size: value - sd for size, value in LOGLIK.items()}
    assert laplace == pytest.approx([2.5, equivalent(-0.375, up), equivalent(-0.375, down)])
    assert laplace[1] < laplace[0] < laplace[2]
    assert "size 4 are interpolated" in grid.note and "method.size=4" in grid.note


def test_better_than_the_largest_is_said(ensembles):
    ensembles.row("swag", -0.1, 6)
    grid = grid_of(ensembles)
    line = next(line for line in grid.lines if "swag" in line.words)
    assert line.entries[1].mean == 5 and "swag" in grid.note and "lower bound" in grid.note


def test_uncalibrated_classes_are_not_compared(ensembles, capsys):
    """Planted bug: a single network without temperature compared with calibrated ensembles."""
    score = {"metric": "marginal_loglik", "value": -0.36, "better": "higher"}
    ensembles("sgld", 0, [score], kind="classification", data="mnist", hash8="7000abcd")
    assert not any("sgld" in line.words for line in grid_of(ensembles).lines)
    ensembles("map", 0, [score], kind="classification", data="digits", hash8="7000abcd")
    assert main(["--output-dir", str(ensembles.outputs), "data=digits", "--equivalents"]) == 2
    assert "eval.calibrate=temperature" in capsys.readouterr().err


def test_dee_as_a_metric_leads_to_the_option(ensembles, capsys):
    assert main(["--output-dir", str(ensembles.outputs), "--metrics", "dee,marginal_loglik"]) == 2
    assert "--equivalents" in capsys.readouterr().err


def test_two_rows_of_one_size_are_refused(ensembles):
    ensembles.row("ensemble", -0.2, 8, **{"method.size": 3, "schedule.epochs": 7})
    with pytest.raises(UserError, match=r"ensemble of size 3.*schedule\.epochs"):
        grid_of(ensembles)
