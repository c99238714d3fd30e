"""Tables by axes, paired differences, ranks, medians, and the commands for missing results."""

import csv
import io
import math
import statistics

import pytest

from bnn_runner.cli.report import main
from bnn_runner.errors import UserError
from bnn_runner.report.axes import by_axes
from bnn_runner.report.commands import missing_commands
from bnn_runner.report.filters import parse_filters, select
from bnn_runner.report.grid import to_csv
from bnn_runner.report.paired import paired_differences, without_extra
from bnn_runner.report.ranks import mean_ranks
from bnn_runner.report.read_cells import find_cells
from bnn_runner.report.render import report_of, to_markdown
from bnn_runner.report.tables import build


def table(write_cell, metrics=None, *filters):
    return build(select(find_cells(write_cell.outputs), parse_filters(filters, "")), metrics)


def values(grid):
    return {line.words: [e and e.mean for e in line.entries] for line in grid.lines}


@pytest.fixture
def two_sets(write_cell):
    """rmse of three methods on two data sets, seeds 0 to 2; epochs 100, and MAP on yacht also with 300."""
    numbers = {
        ("yacht", "map"): (1.0, 1.2, 1.1),
        ("yacht", "laplace"): (0.7, 0.8, 0.9),
        ("yacht", "swag"): (1.0, 1.2, 1.1),
        ("boston", "map"): (3.0, 3.1, 3.2),
        ("boston", "laplace"): (2.0, 2.6, 2.3),
        ("boston", "swag"): (1.5, 1.7, 1.6),
    }
    for (data, method), found in numbers.items():
        for seed, value in enumerate(found):
            write_cell(method, seed, [{"metric": "rmse", "value": value, "standard_error": 0.01}], data=data)
    return write_cell


def test_methods_down_data_sets_across(two_sets):
    """Planted bugs: an entry at another data set's place; columns by the order of folders instead of values."""
    (grid,) = by_axes(table(two_sets), ["method"], ["data"], "mean")
    assert grid.heads == ("boston", "yacht") and grid.words == ("method",)
    assert values(grid)[("laplace",)] == [pytest.approx(2.3), pytest.approx(0.8)]
    assert "n = 3 seeds" in grid.note
    records = list(csv.DictReader(io.StringIO(to_csv([grid]))))
    assert len(records) == 6 and {r["column"] for r in records} == {"boston", "yacht"}
    assert float(next(r for r in records if r["method"] == "map" and r["column"] == "yacht")["mean"]) == pytest.approx(
        1.1
    )


def test_values_of_a_setting_are_ordered_as_numbers(write_cell):
    for place, epochs in enumerate((9, 10, 100)):
        write_cell(scores=[("rmse", epochs)], config={"schedule.epochs": epochs}, hash8=f"{place}0000000")
    (grid,) = by_axes(table(write_cell), ["method"], ["schedule.epochs"], "mean")
    assert grid.heads == ("schedule.epochs=9", "schedule.epochs=10", "schedule.epochs=100")
    assert values(grid) == {("map",): [9, 10, 100]}


def test_settings_on_no_axis_are_refused_by_name(two_sets):
    """Planted bug: a mean over 100 and 300 epochs."""
    two_sets("map", 0, [("rmse", 0.2)], data="yacht", config={"schedule.epochs": 300}, hash8="1111abcd")
    with pytest.raises(UserError, match=r"method=map must agree.*differ in schedule\.epochs \(100, 300\)"):
        by_axes(table(two_sets), ["data", "method"], [], "mean")
    (grid,) = by_axes(table(two_sets, None, "schedule.epochs=300"), ["data", "method"], [], "mean")
    assert values(grid) == {("yacht", "map", "1"): [0.2]}
    (grid,) = by_axes(table(two_sets), ["data", "method", "schedule.epochs"], [], "mean")
    assert len(grid.lines) == 7


def test_seed_as_an_axis_averages_nothing(two_sets):
    (grid,) = by_axes(table(two_sets, None, "data=yacht"), ["seed"], ["method"], "mean")
    assert grid.heads == ("laplace", "map", "swag")
    assert values(grid) == {("0",): [0.7, 1.0, 1.0], ("1",): [0.8, 1.2, 1.2], ("2",): [0.9, 1.1, 1.1]}


def test_differences_are_paired_by_seed(two_sets):
    """Planted bugs: independent standard errors; a baseline of another data set; the sign turned round; a star for
    p = .035, which is not significant among four differences.
    """
    grid = paired_differences(table(two_sets), parse_filters(["method=map"], ""), "mean")
    lines = {line.words[:3]: line for line in grid.lines}
    assert set(lines) == {(d, "mlp", m) for d in ("boston", "yacht") for m in ("laplace", "swag")}
    found = lines[("boston", "mlp", "laplace")].entries[0]
    differences = [2.0 - 3.0, 2.6 - 3.1, 2.3 - 3.2]
    assert found.n == 3 and found.mean == pytest.approx(statistics.fmean(differences))
    assert found.standard_error == pytest.approx(statistics.stdev(differences) / math.sqrt(3))
    starred = {line.words[2]: line.starred for line in grid.lines if line.words[0] == "boston"}
    assert starred == {"swag": {0}, "laplace": set()} and "over the 4 differences" in grid.note
    assert next(line for line in grid.lines if line.starred).texts("mean")[-1] == "-1.500 ± 0.058*"
    same = lines[("yacht", "mlp", "swag")]
    assert same.entries[0].mean == 0 and not same.starred


def test_differences_use_the_seeds_that_both_have(two_sets):
    two_sets("laplace", 3, [("rmse", 100.0)], data="yacht")
    grid = paired_differences(table(two_sets, None, "data=yacht"), parse_filters(["method=map"], ""), "mean")
    line = next(line for line in grid.lines if line.words[2] == "laplace")
    assert line.n == 3 and line.entries[0].mean == pytest.approx(-0.3)


def test_the_nearest_baseline_is_taken_and_a_tie_refused(two_sets):
    for method in ("map", "laplace"):
        two_sets(method, 0, [("rmse", 0.5)], data="yacht", config={"schedule.epochs": 300}, hash8="1111abcd")
    baseline = parse_filters(["method=map"], "")
    grid = without_extra(paired_differences(table(two_sets, None, "data=yacht"), baseline, "mean"))
    place = grid.words.index("schedule.epochs")
    found = {(line.words[2], line.words[place]): line.entries[0].mean for line in grid.lines}
    assert found[("laplace", "300")] == 0 and found[("laplace", "100")] == pytest.approx(-0.3)
    two_sets("sgld", 0, [("rmse", 0.5)], data="yacht", config={"schedule.epochs": 200}, hash8="2222abcd")
    with pytest.raises(UserError, match=r"must be a single row.*differ in schedule\.epochs"):
        paired_differences(table(two_sets, None, "data=yacht"), baseline, "mean")


def test_ranks_over_data_sets(two_sets):
    """Planted bugs: 1 for the worst; ties by order; a data set where a method is missing."""
    grid = mean_ranks(table(two_sets))
    assert values(grid) == {("map",): [2.75], ("laplace",): [1.5], ("swag",): [1.75]}
    assert grid.lines[0].n == 2 and grid.lines[0].entries[0].standard_error == pytest.approx(0.25)
    two_sets("map", 0, [("rmse", 9.0)], data="wine")
    grid = mean_ranks(table(two_sets))
    assert values(grid)[("map",)] == [2.75] and "2 of 3" in grid.note


def test_medians_and_quartiles(write_cell):
    for seed, value in enumerate((1.0, 2.0, 3.0, 4.0, 100.0)):
        write_cell(seed=seed, scores=[("rmse", value)])
    text = to_markdown(report_of(table(write_cell), "median"))
    assert "3.0 [2.0, 4.0]" in text and "Median [first quartile" in text and "±" not in text


def test_what_is_missing_comes_with_its_command(two_sets, capsys):
    """Planted bugs: a command without the seeds; one that would run finished seeds again."""
    folder = two_sets("map", 7, None, data="yacht", status="FAILED", reason="boom")
    (folder / "command.txt").write_text("bnn-run data=yacht method=map 'model.hidden=[50]' seed=7\n")
    for seed in (8, 9):
        (two_sets("laplace", seed, data="yacht") / "command.txt").write_text(
            "bnn-run data=yacht method=laplace seed=8\n"
        )
    commands = missing_commands(table(two_sets))
    assert commands == [
        "bnn-run -m data=yacht method=map 'model.hidden=[50]' seed=7,8,9",
        "bnn-run data=yacht method=laplace seed=7",
    ]
    assert main(["--output-dir", str(two_sets.outputs), "--no-figure", "--format", "md"]) == 0
    assert commands[0] in capsys.readouterr().out


@pytest.mark.parametrize("word", ["model.hidden=[50]", "model.hidden=[ 50 ]", "schedule.epochs=100.0", "seed=0,1,2"])
def test_filters_know_a_value_in_any_spelling(two_sets, word):
    assert len(select(find_cells(two_sets.outputs), parse_filters([word], ""))) == 18


def test_everything_at_once_on_the_command_line(two_sets, capsys):
    arguments = ["--rows", "method", "--columns", "data", "--baseline", "method=map", "--ranks", "--no-figure"]
    assert main(["--output-dir", str(two_sets.outputs), *arguments]) == 0
    page = capsys.readouterr().out
    assert "### rmse ↓ by data" in page and "### differences from method=map" in page and "### mean ranks" in page
    files = {p.name for p in (two_sets.outputs / "results").iterdir()}
    assert files == {f"comparison.{e}" for e in ("csv", "html", "md", "tex")} | {"comparison_tables.csv"}
