"""Published values compared with ours: verdicts by both errors, selection by validation, no recalled values."""

from __future__ import annotations

import csv
import dataclasses
import math

import pytest

from bnn_runner.cli.report import main
from bnn_runner.config.groups import Catalogue
from bnn_runner.report import published as module
from bnn_runner.report.published import Published, compare_with_published, outliers, published, verdict
from bnn_runner.report.read_cells import find_cells

ROW = Published("e", "s", "V", "d", "", "m", "", "rmse", "1.0", "0.1", "se", "20", "3se", "its error")


def rows_of_the_file():
    with module.FILE.open(encoding="utf-8", newline="") as file:
        return [Published(**row) for row in csv.DictReader(file)]


@pytest.fixture
def values(tmp_path, monkeypatch):
    """Published values of a toy experiment instead of the file's."""

    def put(*rows):
        path = tmp_path / "published.csv"
        with path.open("w", newline="") as file:
            writer = csv.DictWriter(file, module.COLUMNS)
            writer.writeheader()
            writer.writerows(dataclasses.asdict(row) for row in rows)
        monkeypatch.setattr(module, "FILE", path)
        published.cache_clear()

    yield put
    published.cache_clear()


def test_a_mean_dominated_by_one_value_is_reported():
    assert outliers([0.6, 0.62, 0.61, 0.63, 0.64, 0.6, 8.8]) == ", mean dominated by outliers (median 0.62)"
    assert outliers([0.6, 0.62, 0.61, 0.63, 0.64, 0.6, 0.66]) == "" and outliers([0.6, 0.62, 8.8]) == ""


def test_verdicts_by_the_published_error_alone():
    """Planted bugs: our own spread widens "within", as one split that ran away did; a published standard deviation
    taken for a standard error; worse reported as better.
    """
    row = dataclasses.replace(ROW, tolerance="3se")
    assert verdict([1.28, 1.30], row) == "within" and verdict([1.30, 1.32], row) == "WORSE"
    assert verdict([0.6, 0.61], row) == "better"
    assert verdict([0.5, 2.0], row) == "undecided", "inside, but by chance: our error is larger than the tolerance"
    assert verdict([0.6, 0.6, 0.6, 8.0], row) == "WORSE", "an own error of 1.8 does not excuse a mean of 2.5"
    of = dataclasses.replace(row, kind="std")
    assert verdict([1.06, 1.07], of) == "within" and verdict([1.07, 1.08], of) == "WORSE"
    loglik = dataclasses.replace(
        ROW, quantity="marginal_loglik", value="-1.0", spread="0.1", kind="std", tolerance="1std"
    )
    assert verdict([-1.09, -1.1], loglik) == "within" and verdict([-1.2, -1.2], loglik) == "WORSE"
    share = dataclasses.replace(ROW, quantity="epistemic_std", spread="", kind="", tolerance="0.2x")
    assert verdict([1.19], share, 0.01) == "within" and verdict([1.21], share) == "DIFFERS"
    assert verdict([1.19], share) == "undecided", "one run, and nothing is known of its error"
    assert verdict([9.0], dataclasses.replace(ROW, tolerance="")) == "—"
    same = dataclasses.replace(share, kind="identity", tolerance="0.02x")
    assert verdict([1.01], same) == "identity holds" and verdict([1.03], same) == "IDENTITY BROKEN"


@pytest.mark.parametrize("tolerance", sorted({r.tolerance for r in rows_of_the_file() if r.slack == r.slack}))
def test_a_wrong_value_is_caught(tolerance):
    """Planted value: each row's own, moved by a hundredth more than its tolerance, either way."""
    for row in rows_of_the_file():
        if row.tolerance != tolerance or row.kind == "order":
            continue
        theirs = float(row.value)
        for side in (-1, 1):
            wrong, right = theirs + 1.01 * side * row.slack, theirs + 0.99 * side * row.slack
            assert verdict([wrong] * 3, row) in ("WORSE", "DIFFERS", "better", "IDENTITY BROKEN"), row
            assert verdict([right] * 3, row) in ("within", "identity holds"), row


def test_tolerances_have_reasons_and_are_no_wider_than_the_published_spread():
    """Planted bug: ± 0.1 nats where the published standard deviation is 0.01."""
    for row in rows_of_the_file():
        assert bool(row.tolerance) == bool(row.why), row
        if row.slack == row.slack and row.deviation == row.deviation and row.kind != "identity":
            last_digit = 10.0 ** -len(row.spread.partition(".")[2])
            widest = row.deviation if float(row.spread) else last_digit / 2 * math.sqrt(float(row.n))
            few = 3 / math.sqrt(float(row.n)) if row.tolerance.endswith("se") else 1.0
            assert row.slack <= max(widest, few * row.deviation) + 1e-9, row


def test_the_table_of_an_experiment(write_cell, values, capsys):
    """Planted bugs: runs of two settings averaged; a value of another data set or method; one that is recalled."""
    for seed in range(2):
        chosen = {"experiment": "e"}
        write_cell("map", seed, [("rmse", 1.0 + 0.1 * seed), ("accuracy", 0.9)], data="d", choices=chosen)
        for i, rate in enumerate((0.1, 0.2)):
            write_cell(
                "mc_dropout", seed, [("rmse", 0.5 + i)], data="d", choices=chosen, config={"method.rate": rate},
                hash8=f"{i}000abcd",
            )  # fmt: skip
    one = dataclasses.replace(ROW, method="map", value="1.05")
    other = dataclasses.replace(one, data="large", beside="d", value="5.0")
    values(
        one,
        dataclasses.replace(one, status="R", value="7.77"),
        dataclasses.replace(one, data="other", value="8.88"),
        dataclasses.replace(one, quantity="error_percent", value="10", spread="", tolerance="0.5"),
        dataclasses.replace(one, method="mc_dropout"),
        dataclasses.replace(one, method="", source="PBP", value="9.99", kind="elsewhere"),
        other,
    )
    assert main(["--output-dir", str(write_cell.outputs), "experiment=e", "--no-figure", "--format", "md"]) == 0
    text = capsys.readouterr().out
    assert "7.77" not in text and "8.88" not in text
    grid = compare_with_published(find_cells(write_cell.outputs), "e")
    assert grid is not None
    shown = [(line.words[2], line.words[4], line.words[6], line.texts("mean")[-1]) for line in grid.lines]
    assert shown[0] == ("map", "rmse", "within", "1.050 ± 0.050")
    assert shown[1][:3] == ("map", "error_percent", "within")
    assert [(t[0], t[3]) for t in shown[2:4]] == [("mc_dropout", "0.5000"), ("mc_dropout", "1.500")]
    assert shown[4][0] == "" and shown[4][3] == "—", "a method that we do not run is there for comparison"
    assert shown[5][:3] == ("map", "rmse", "other size") and grid.lines[5].words[0] == "d"
    assert grid.lines[0].words[7] == "± 0.3 (its error)" and "[V]: read in the authors' files." in grid.note
    assert "[S]" not in grid.note
    assert compare_with_published(find_cells(write_cell.outputs), "another") is None


def test_orders_are_judged_step_by_step(write_cell, values):
    """Planted bugs: an order that holds by a third of its error; one seed that decides; a mean over two models."""
    numbers = {"a": (3.0, 3.1, 2.9), "b": (1.0, 1.1, 1.05), "c": (1.04, 1.0, 1.1)}
    for method, found in numbers.items():
        for seed, value in enumerate(found):
            score = {"metric": "rmse", "value": value, "standard_error": 0.01}
            write_cell(method, seed, [score], data="d")
            if seed == 0:
                write_cell(method, seed, [score], data="d", model="cnn")
    order = dataclasses.replace(ROW, method="", kind="order", value="a > b", tolerance="", why="")
    values(
        order,
        dataclasses.replace(order, value="b > a"),
        dataclasses.replace(order, value="a > b > c > x"),
        dataclasses.replace(order, value="b > c", tolerance="0.5", why="margin"),
    )
    grid = compare_with_published(find_cells(write_cell.outputs), "e")
    assert grid is not None
    found = {(line.words[8], line.words[1]): (line.words[6], line.words[3]) for line in grid.lines}
    assert found["a > b", "mlp"][0] == "order holds" and found["b > a", "mlp"][0] == "order does not hold"
    assert found["a > b > c > x", "mlp"] == ("order undecided", "step b − c")
    assert found["b > c", "mlp"][0] == "order holds", "no worse than by the margin"
    assert {v for (_, model), (v, _) in found.items() if model == "cnn"} == {"order undecided"}, "one seed"
    assert "paired t test" in grid.note


def test_flagged_values_are_marked_and_not_judged(write_cell, values):
    """Planted bug: the value of a score that has not converged is called within."""
    for seed in range(3):
        score = {"metric": "marginal_loglik", "value": -1.0, "better": "higher", "status": "not converged"}
        write_cell("map", seed, [score], data="d")
        write_cell("mc_dropout", seed, [score | {"value": -2.0 - seed, "status": "ok"}], data="d")
    loglik = dataclasses.replace(ROW, method="map", quantity="marginal_loglik", value="-1.0")
    values(loglik, dataclasses.replace(loglik, method="", kind="order", value="map > mc_dropout", tolerance="", why=""))
    grid = compare_with_published(find_cells(write_cell.outputs), "e")
    assert grid is not None and [line.words[6] for line in grid.lines] == ["not converged"] * 2
    assert all(line.texts("mean")[-1].endswith("†") for line in grid.lines) and "† not converged" in grid.note


def test_dropout_rates_are_chosen_on_the_validation_part(write_cell, values):
    """Planted bug: chosen on the test part, so that the published rule is not what is compared."""
    for rate, val, rmse in ((0.1, -1.0, 2.0), (0.2, -2.0, 1.0)):
        scores = [("rmse", rmse), {"metric": "marginal_loglik", "split": "val", "value": val}]
        write_cell("mc_dropout", 0, scores, data="d", config={"method.rate": rate}, hash8=f"{rate * 10:.0f}000abcd")
    values(dataclasses.replace(ROW, experiment="uci_mc_dropout", method="mc_dropout"))
    grid = compare_with_published(find_cells(write_cell.outputs), "uci_mc_dropout")
    assert grid is not None and [line.texts("mean")[-1] for line in grid.lines] == ["2.000"]
    assert "best on its validation part" in grid.note


def test_the_file_is_whole():
    """Planted bug: an experiment that is not there, so that its values are never shown."""
    with module.FILE.open(encoding="utf-8", newline="") as file:
        rows = [Published(**row) for row in csv.DictReader(file)]
    catalogue = Catalogue()
    assert len(rows) > 50 and {r.experiment for r in rows} <= set(catalogue.choices("experiment"))
    for row in rows:
        assert row.source and row.status in ("V", "V3", "C", "S", "R"), row
        assert row.kind in ("", "se", "std", "order", "elsewhere", "identity"), row
        assert not row.tolerance.endswith(("se", "std")) or (row.spread and row.kind in ("se", "std")), row
        assert (" / " in row.quantity) == (row.kind == "identity"), "an identity is no reproduction"
        assert not row.beside or row.beside in catalogue.choices("data"), row
        assert row.kind == "order" or float(row.value) is not None
        assert not row.data or row.data in catalogue.choices("data"), row
        assert not row.method or row.method in catalogue.choices("method"), row
        assert all(m.strip() in catalogue.choices("method") for m in row.value.split(">")) or row.kind != "order", row
    shown = [r for e in {r.experiment for r in rows} for r in published(e)]
    assert len(shown) == sum(r.status != "R" for r in rows), "a value recalled without a source is never shown"


def test_two_settings_of_a_method_are_judged_apart(write_cell, values):
    """Planted bug: the two rows of a method, by evidence and by grid, averaged or paired crosswise."""
    for seed in range(3):
        for rule, shift in (("evidence", -1.0), ("grid", 1.0)):
            for place, method in enumerate(("laplace_full", "laplace_kfac")):
                score = {"metric": "rmse", "value": shift + 0.01 * seed + 0.5 * place, "standard_error": 0.01}
                code = f"{place}{'eg'.index(rule[0])}00abcd"
                named = {"choices": {"hyper": rule}, "config": {"hyper._target_": rule}}
                write_cell(method, seed, [score], data="d", hash8=code, **named)
        write_cell("ensemble", seed, [{"metric": "rmse", "value": 0.0, "standard_error": 0.01}], data="d")
    order = dataclasses.replace(ROW, method="", kind="order", value="laplace_full > ensemble", tolerance="", why="")
    values(order, dataclasses.replace(order, value="laplace_kfac > laplace_full"))
    grid = compare_with_published(find_cells(write_cell.outputs), "e")
    assert grid is not None
    assert [(line.words[3], line.words[6]) for line in grid.lines] == [
        ("hyper=evidence step laplace_full − ensemble", "order does not hold"),
        ("hyper=grid step laplace_full − ensemble", "order holds"),
        ("hyper=evidence step laplace_kfac − laplace_full", "order holds"),
        ("hyper=grid step laplace_kfac − laplace_full", "order holds"),
    ]


def test_the_cost_of_pruning_is_compared_by_its_paired_error(write_cell, values):
    """Planted bugs: the cost of another share; the error itself for its increase; a run that was not pruned."""
    folder = write_cell("bbb", 0, data="d", choices={"experiment": "e"})
    row = dataclasses.replace(
        ROW, method="bbb", quantity="pruning cost 98", value="0.15", spread="", kind="", tolerance="0.1", why="noise"
    )
    values(row)
    assert compare_with_published(find_cells(write_cell.outputs), "e") is None
    table = "removed_percent,error,cost,cost_standard_error\n0.0,1.6,0.0,0.0\n98.0,3.0,1.4,0.03\n"
    (folder / "pruning.csv").write_text(table)
    grid = compare_with_published(find_cells(write_cell.outputs), "e")
    assert grid is not None and [(line.words[6], line.entries[0].mean) for line in grid.lines] == [("WORSE", 1.4)]
