"""The figure of differences from a baseline over data sets."""

from __future__ import annotations

from bnn_runner.cli.report import main


def _cells(write_cell, sets):
    for k, data in enumerate(sets):
        for seed in range(3):
            for i, (method, value) in enumerate((("map", 1.0), ("swag", 2.0 + seed), ("bbb", -50.0))):
                score = {"metric": "marginal_loglik", "value": value, "better": "higher", "unit": "nats per point"}
                write_cell(method, seed, [score], data=data, hash8=f"{i}{k}00abcd", config={"data.splits": "gap"})


def test_points_are_the_paired_differences_of_each_data_set(write_cell, seen_figures):
    """Planted bugs: the baseline drawn as a method; data sets in another order than their labels."""
    _cells(write_cell, ("yacht", "boston"))
    assert main(["--output-dir", str(write_cell.outputs), "--baseline", "method=map", "--name", "a"]) == 0
    figure = seen_figures["a_baseline.png"]
    [ax] = figure.axes
    assert [t.get_text() for t in ax.get_yticklabels()] == ["boston", "yacht"]
    points = {c.get_label(): sorted(c.lines[0].get_xdata()) for c in ax.containers}
    assert points == {"bbb": [-51.0, -51.0], "swag": [2.0, 2.0]}


def test_one_data_set_has_no_figure(write_cell, seen_figures):
    _cells(write_cell, ("yacht",))
    assert main(["--output-dir", str(write_cell.outputs), "--baseline", "method=map", "--name", "a"]) == 0
    assert "a_baseline.png" not in seen_figures
