"""Published values compared with ours: verdicts by both errors, selection by validation, no recalled values."""

from __future__ import annotations

import csv
import dataclasses

import pytest

from bnn_runner.cli.report import main
from bnn_runner.config.groups import Catalogue
from bnn_runner.report import published as module
from bnn_runner.report.published import Published, compare_with_published, outliers, published, verdict
from bnn_runner.report.read_cells import find_cells

ROW = Published("e", "s", "V", "d", "", "m", "", "rmse", "1.0", "0.1", "se", "20", "2se")
SE = "2se+0.05"


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


def test_verdicts_count_both_errors():
    """Planted bugs: a published standard deviation taken for a standard error; worse reported as better."""
    assert verdict([1.1, 1.3], ROW) == "within"  # 1.2 ± 0.1 and 1.0 ± 0.1
    assert verdict([1.29, 1.31], ROW) == "WORSE" and verdict([0.7, 0.71], ROW) == "better"
    of = dataclasses.replace(ROW, kind="std")
    assert verdict([1.1, 1.3], of) == "within" and verdict([1.19, 1.21], of) == "WORSE"
    loglik = dataclasses.replace(ROW, quantity="marginal_loglik", value="-1.0", spread="0.01", tolerance=SE)
    assert verdict([-1.06, -1.06], loglik) == "within" and verdict([-1.2, -1.2], loglik) == "WORSE"
    share = dataclasses.replace(ROW, quantity="epistemic_std", spread="", tolerance="0.2x")
    assert verdict([1.19], share) == "within" and verdict([1.21], share) == "DIFFERS"
    assert verdict([9.0], dataclasses.replace(ROW, tolerance="")) == "—"


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
    values(
        one,
        dataclasses.replace(one, status="R", value="7.77"),
        dataclasses.replace(one, data="other", value="8.88"),
        dataclasses.replace(one, quantity="error_percent", value="10", spread="", tolerance="0.5"),
        dataclasses.replace(one, method="mc_dropout"),
        dataclasses.replace(one, method="", source="PBP", value="9.99", kind="elsewhere"),
        dataclasses.replace(one, method="", value="map > mc_dropout", kind="order", case="", tolerance="0"),
    )
    assert main(["--output-dir", str(write_cell.outputs), "experiment=e", "--no-figure", "--format", "md"]) == 0
    text = capsys.readouterr().out
    assert "7.77" not in text and "8.88" not in text
    grid = compare_with_published(find_cells(write_cell.outputs), "e")
    assert grid is not None
    shown = [(line.words[2], line.words[4], line.words[6], line.texts("mean")[-1]) for line in grid.lines]
    assert shown[0] == ("map", "rmse", "within", "1.050 ± 0.050")
    assert shown[1][:3] == ("map", "error_percent", "within")
    assert [(t[0], t[3]) for t in shown[2:4]] == [("mc_dropout", "0.5000 ± 0"), ("mc_dropout", "1.500 ± 0")]
    assert shown[4][0] == "" and shown[4][3] == "—", "a method that we do not run is there for comparison"
    assert shown[5][2] == "order holds"
    assert compare_with_published(find_cells(write_cell.outputs), "another") is None


def test_an_order_that_is_broken_says_so(write_cell, values):
    for method, rmse in (("a", 3.0), ("b", 1.0), ("c", 1.2)):
        write_cell(method, 0, [("rmse", rmse)], data="d")
    order = dataclasses.replace(ROW, method="", kind="order", value="a > b > c", tolerance="0.1")
    values(order, dataclasses.replace(order, tolerance="0.3"), dataclasses.replace(order, value="a > c > b > x"))
    grid = compare_with_published(find_cells(write_cell.outputs), "e")
    assert grid is not None
    assert [line.words[6] for line in grid.lines] == ["ORDER DOES NOT HOLD", "order holds", "order holds"]


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
        assert row.kind in ("", "se", "std", "order", "elsewhere"), row
        assert not row.tolerance.startswith("2se") or (row.spread and row.kind in ("se", "std")), row
        assert row.kind == "order" or float(row.value) is not None
        assert not row.data or row.data in catalogue.choices("data"), row
        assert not row.method or row.method in catalogue.choices("method"), row
        assert all(m.strip() in catalogue.choices("method") for m in row.value.split(">")) or row.kind != "order", row
    shown = [r for e in {r.experiment for r in rows} for r in published(e)]
    assert len(shown) == sum(r.status != "R" for r in rows), "a value recalled without a source is never shown"
