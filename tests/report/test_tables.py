import csv
import io
import math
import statistics

import pytest

from bnn_runner.errors import UserError
from bnn_runner.report.columns import Column, in_order, select_columns
from bnn_runner.report.numbers import number
from bnn_runner.report.read_cells import ScoreRow, find_cells
from bnn_runner.report.render import report_of, to_csv, to_latex, to_markdown
from bnn_runner.report.tables import aggregate, build

RMSE = Column("rmse")


def _table(write_cell, metrics=None):
    return build(find_cells(write_cell.outputs), metrics)


def _row(table, method, **extra):
    found = [r for r in table.rows if r.group.key.method == method and extra.items() <= r.extra.items()]
    assert len(found) == 1, [r.name for r in table.rows]
    return found[0]


def test_nine_cells_make_three_rows_of_three_seeds(nine_cells):
    table = _table(nine_cells)
    assert [r.group.key.method for r in table.rows] == ["map", "ensemble", "laplace"]
    assert [r.n for r in table.rows] == [3, 3, 3]
    assert table.extra == []
    entry = _row(table, "ensemble").entries[RMSE]
    values = [0.79, 0.80, 0.81]
    assert entry.mean == pytest.approx(statistics.mean(values))
    assert entry.standard_error == pytest.approx(statistics.stdev(values) / math.sqrt(3))
    assert table.best(RMSE) == {2}
    assert table.best(Column("joint_loglik", tau=10)) == {2}  # higher is better: -5 beats -8 and -10
    assert not [n for n in table.notes if "missing" in n]
    assert "9 cells (9 done)" in table.provenance


@pytest.mark.parametrize("bad", ["nan", "inf", ""])
def test_a_seed_that_is_no_number_is_never_averaged_away(write_cell, bad):
    """Plant: skip NaN in the mean. The method that diverges once would look like 1.0."""
    for seed in range(5):
        write_cell("map", seed, [("rmse", bad if seed == 3 else 1.0)])
        write_cell("laplace", seed, [("rmse", 2.0 + 0.01 * seed)])
    table = _table(write_cell)
    entry = _row(table, "map").entries[RMSE]
    assert not math.isfinite(entry.mean)
    assert (entry.n, entry.nonfinite) == (5, 1)
    assert "(1 of 5)" in to_markdown(report_of(table))
    assert table.best(RMSE) == set()  # nobody is left to be better than
    record = next(r for r in csv.DictReader(io.StringIO(to_csv(table))) if r["method"] == "map")
    assert record["rmse_mean"] == ("inf" if bad == "inf" else "nan")
    assert (record["rmse_nan"], record["rmse_n"], record["rmse_se"]) == ("1", "5", "")


def test_missing_failed_and_interrupted_seeds_are_reported(nine_cells):
    nine_cells("laplace", 3, None, status="FAILED", reason="loss is nan at epoch 2\nTraceback", hash8="2000abcd")
    nine_cells("laplace", 4, None, status="INTERRUPTED", reason="SIGTERM", hash8="2000abcd")
    table = _table(nine_cells)
    laplace, ordinary = _row(table, "laplace"), _row(table, "map")
    assert laplace.missing == {3: "failed", 4: "interrupted"}
    assert ordinary.missing == {3: "not run", 4: "not run"}
    assert (laplace.count("failed"), laplace.count("interrupted")) == (1, 1)
    assert table.best(RMSE) == set()  # best only among its survivors
    text = to_markdown(report_of(table))
    assert "FAILED yacht/mlp/laplace/3-2000abcd: loss is nan at epoch 2" in text
    assert "INTERRUPTED yacht/mlp/laplace/4-2000abcd: SIGTERM" in text
    assert "Traceback" not in text
    record = next(r for r in csv.DictReader(io.StringIO(to_csv(table))) if r["method"] == "laplace")
    assert (record["failed"], record["interrupted"], record["missing_seeds"]) == ("1", "1", "3 4")


def test_a_method_that_only_failed_has_a_row(nine_cells):
    folder = nine_cells("sgld", 0, None, status="FAILED", reason="out of memory", hash8="3000abcd")
    (folder / "cell.json").unlink()
    row = _row(_table(nine_cells), "sgld")
    assert (row.n, row.count("failed"), row.missing[0]) == (0, 1, "failed")


def test_one_seed_has_no_standard_error_and_is_never_bold(write_cell):
    write_cell("map", 0, [("rmse", 2.0)])
    write_cell("laplace", 0, [("rmse", 1.0)])
    table = _table(write_cell)
    assert table.best(RMSE) == set()
    assert "±" not in to_markdown(report_of(table)).split("Mean ±")[0]
    assert next(csv.DictReader(io.StringIO(to_csv(table))))["rmse_se"] == ""


@pytest.mark.parametrize(("gap", "bold"), [(0.45, False), (0.55, True)])
def test_bold_needs_a_significant_difference(write_cell, gap, bold):
    """Differences g - 2s, g, g + 2s have s.e. 2s/√3; with s = 0.1 and t = 4.303 the limit is 0.497."""
    for seed, step in enumerate((-0.1, 0.0, 0.1)):
        for method, value in (("map", 1.0 + step), ("laplace", 1.0 - gap - step), ("ensemble", 3.0 + step)):
            write_cell(method, seed, [{"metric": "rmse", "value": value, "standard_error": 0.01}])
    table = _table(write_cell)
    places = {i for i, row in enumerate(table.rows) if row.group.key.method == "laplace"}
    assert table.best(RMSE) == (places if bold else set())
    assert to_latex(report_of(table)).count("\\textbf{") == int(bold)
    assert to_markdown(report_of(table)).count("**") == 2 * int(bold)


def test_bold_compares_within_a_data_set_only(write_cell):
    for seed in range(3):
        for method, value, data in (("map", 1.0, "yacht"), ("map", 9.0, "boston"), ("laplace", 5.0, "boston")):
            score = {"metric": "rmse", "value": value + 0.01 * seed, "standard_error": 0.01}
            write_cell(method, seed, [score], data=data)
    table = _table(write_cell)
    winners = [table.rows[i].name for i in table.best(RMSE)]
    assert winners == ["boston/mlp/laplace"]


def test_differing_settings_are_rows_of_their_own(nine_cells):
    """Plant: group by data, model and method only; the two prior precisions would be mixed."""
    nine_cells("map", 0, [("rmse", 5.0)], config={"prior.precision": 10.0}, hash8="9000abcd")
    nine_cells("map", 1, [("rmse", 5.2)], config={"prior.precision": 10}, hash8="9000abcd")
    table = _table(nine_cells)
    assert table.extra == ["prior.precision"]
    assert _row(table, "map", **{"prior.precision": "10"}).n == 2
    assert _row(table, "map", **{"prior.precision": "—"}).n == 3


def test_rows_go_by_size_where_settings_are_numbers(write_cell):
    """Planted bug: 100 before 25, and two layers of 20 before one."""
    for i, (epochs, hidden) in enumerate([(100, [20]), (25, [100]), (5, [20, 20]), (25, [20])]):
        write_cell("map", 0, hash8=f"0000000{i}", config={"schedule.epochs": epochs, "model.hidden": hidden})
    table = _table(write_cell)
    found = [(r.group.key.values["model.hidden"], r.group.key.values["schedule.epochs"]) for r in table.rows]
    assert found == [("[20]", "25"), ("[20]", "100"), ("[20, 20]", "5"), ("[100]", "25")]


def test_a_choice_stands_for_the_fields_it_sets(nine_cells):
    sgd = {"schedule.epochs": 7, "schedule.momentum": 0.9}
    nine_cells("map", 0, config=sgd, choices={"schedule": "sgd"}, hash8="9000abcd")
    assert _table(nine_cells).extra == ["schedule"]


def test_neutral_settings_do_not_split_a_row(write_cell):
    for seed, device in enumerate(("cpu", "cuda", "auto")):
        config = {"device": device, "output_dir": f"o{seed}", "metric.ece.bins": seed, "stack": f"{seed}"}
        write_cell(seed=seed, config=config)
    assert [row.n for row in _table(write_cell).rows] == [3]


def test_outdated_results_are_not_mixed(nine_cells):
    nine_cells("map", 5, [("rmse", 9.0)], results_version=0, hash8="9000abcd")
    table = _table(nine_cells)
    assert table.extra == ["results_version"]
    assert _row(table, "map", results_version="1").entries[RMSE].mean == pytest.approx(1.0)
    assert any("outdated" in note for note in table.notes)


def test_shortened_runs_stand_apart_and_are_marked(nine_cells):
    short = {"epochs": [100, 12], "command": "bnn-run"}
    nine_cells("map", 5, [("rmse", 3.0)], shortened=short, hash8="9000abcd")
    table = _table(nine_cells)
    assert sorted(row.n for row in table.rows) == [1, 3, 3, 3]
    text = to_markdown(report_of(table))
    assert "map‡" in text
    assert "epochs: 12 of 100" in text


def test_not_applicable_and_not_converged_keep_their_marks(write_cell):
    for seed in range(2):
        scores = [
            {"metric": "joint_loglik", "tau": 10, "value": -1.0, "status": "not converged", "draws": 40},
            {"metric": "joint_loglik_at_draws", "tau": 10, "value": -9.0, "draws": 10},
            {"metric": "ood_auroc", "split": "ood/far", "value": "", "status": "n/a", "note": "no data"},
        ]
        write_cell("map", seed, scores)
    table = _table(write_cell)
    text = to_markdown(report_of(table))
    assert "-1.000†" in text and "± 0" not in text
    assert "| n/a" not in text and "Left out, because no line has a number: ood_auroc (ood/far) ↓." in text
    assert "n/a: ood_auroc (ood/far): no data." in text
    assert "at_draws" not in to_csv(_table(write_cell, "all"))


def test_partly_not_applicable_says_of_how_many():
    entry = aggregate([ScoreRow("m", 1.0), ScoreRow("m", math.nan, status="n/a")])
    assert (entry.n, entry.not_applicable, entry.mean) == (1, 1, 1.0)


def test_finished_seed_without_the_score_lowers_n(write_cell):
    write_cell(seed=0, scores=[("rmse", 1.0), ("crps", 1.0)])
    write_cell(seed=1, scores=[("rmse", 1.0)])
    assert "(n=1)" in to_markdown(report_of(_table(write_cell)))


def test_kinds_get_tables_of_their_own(nine_cells):
    nine_cells("map", 0, [("accuracy", 0.9)], data="digits", kind="classification")
    text = to_markdown(report_of(_table(nine_cells)))
    classes, regression = text.split("### regression")
    assert "accuracy" in classes
    assert "accuracy" not in regression.split("Mean ±")[0]


@pytest.mark.parametrize(
    ("mean", "error", "text"),
    [
        (-0.5321, 0.0123, "-0.532 ± 0.012"),
        (123.4, 5.6, "123.4 ± 5.6"),
        (1234.0, 56.0, "1234 ± 56"),
        (0.98, math.nan, "0.9800"),
        (math.nan, math.nan, "NaN"),
        (-math.inf, math.nan, "-inf"),
        (0.0, 0.0, "0.000"),
        (1e9, 1e7, "1e+09 ± 1e+07"),
        (3e-8, math.nan, "3.000e-08"),
    ],
)
def test_numbers_are_rounded_to_what_the_error_bears(mean, error, text):
    assert number(mean, error) == text


def test_unknown_metric_is_reported_with_the_nearest(nine_cells):
    with pytest.raises(UserError, match="Did you mean rmse"):
        _table(nine_cells, "rmes")
    assert [c.key for c in _table(nine_cells, "joint_loglik_tau5,rmse").columns] == ["joint_loglik_tau5", "rmse"]


def test_headlines_are_the_default():
    columns = [Column("joint_loglik", tau=t) for t in (1, 5, 10)] + [
        Column("dyadic_loglik", tau=10, kappa=2),
        Column("dyadic_loglik", tau=20, kappa=3),
        Column("marginal_loglik"),
        Column("marginal_loglik", split="val"),
        Column("accuracy"),
        Column("total_entropy"),
        Column("ood_auroc", split="ood/kmnist"),
    ]
    assert [c.label for c in select_columns(columns, None)] == [
        "marginal_loglik",
        "joint_loglik tau=10",
        "dyadic_loglik kappa=2",
        "accuracy",
        "ood_auroc (ood/kmnist)",
    ]
    assert select_columns(columns, "all") == in_order(columns)
    assert len(select_columns(columns, "all")) == len(columns)


def test_versions_of_the_user_s_table_are_rows_of_their_own(write_cell):
    """Planted bug: the mean over runs of a table and of the same table after it was edited."""
    config = {"data.path": "/somewhere/mine.csv"}
    for seed, content, rmse in ((0, "b" * 64, 158.0), (1, "a" * 64, 1.5), (2, "a" * 64, 1.7)):
        write_cell("map", seed, [("rmse", rmse)], data="csv", config=config, content=content, hash8=f"{seed}000abcd")
    table = _table(write_cell)
    assert table.extra == ["data.content"]
    assert _row(table, "map", **{"data.content": "aaaaaaaa"}).entries[RMSE].mean == pytest.approx(1.6)
    assert _row(table, "map", **{"data.content": "bbbbbbbb"}).n == 1
    [note] = [n for n in table.notes if "versions" in n]
    assert "data=csv has 2 versions of mine.csv (data.content aaaaaaaa, bbbbbbbb)" in note and "/somewhere" not in note
