import pytest

from bnn_runner.cli.report import main


def _run(write_cell, *arguments):
    return main(["--output-dir", str(write_cell.outputs), *arguments])


def test_report_writes_tables_and_figure(nine_cells, capsys, is_picture):
    assert _run(nine_cells) == 0
    folder = nine_cells.outputs / "results"
    assert sorted(p.name for p in folder.iterdir()) == sorted(
        ["comparison_curves.png", *(f"comparison.{e}" for e in ("csv", "html", "md", "png", "tex"))]
    )
    assert is_picture(folder / "comparison.png")
    assert (folder / "comparison.md").read_text().strip() in capsys.readouterr().out


def test_partial_sweep_is_reported(nine_cells, is_picture):
    nine_cells("sgld", 0, None, status=None, hash8="3000abcd")
    nine_cells("sgld", 1, None, status="FAILED", reason="diverged", hash8="3000abcd")
    nine_cells("map", 8, [("rmse", "nan")], hash8="0000abcd")
    (nine_cells("map", 9, hash8="0000abcd") / "metrics.csv").write_text("rubbish")
    assert _run(nine_cells, "--name", "partial") == 0
    text = (nine_cells.outputs / "results/partial.md").read_text()
    assert "not finished" in text
    assert "damaged" in text
    assert is_picture(nine_cells.outputs / "results/partial.png")


def test_nothing_finished_yet_is_no_crash(write_cell):
    write_cell(status=None, scores=None)
    assert _run(write_cell) == 0


def test_filters_and_formats(nine_cells):
    assert _run(nine_cells, "--method", "map,laplace", "--format", "csv", "--metrics", "rmse", "--no-figure") == 0
    files = list((nine_cells.outputs / "results").iterdir())
    assert [p.name for p in files] == ["comparison.csv"]
    assert "ensemble" not in files[0].read_text()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--method", "laplase"], ["Did you mean laplace?", "method must be one of"]),
        (["--method", "laplase", "--data", "yatch"], ["laplace", "yacht"]),
        (["--metrics", "rsme"], ["Did you mean rmse?"]),
        (["--format", "pdf"], ["--format", "csv"]),
        (["data"], ["'data' must be a filter", "field=value"]),
        (["shedule.epochs=3"], ["Did you mean schedule.epochs"]),
        (["schedule.epochs=3"], ["schedule.epochs must be one of: 100"]),
        (["--rows", "methd"], ["Did you mean method"]),
        (["--rows", "data", "--columns", "data"], ["The field data must be on one axis"]),
        (["--rows", "data"], ["method (map, ensemble)", "--rows data,method"]),
        (["--baseline", "method=sgld"], ["--baseline must match a finished row; got method=sgld"]),
        (["--ranks", "method=map"], ["two methods"]),
        (["--name", "a/b"], ["--name"]),
        (["--output-dir", "/nonexistent/folder"], ["there is no folder", "--output-dir must be"]),
    ],
)
def test_usage_errors_end_with_two_and_a_message(nine_cells, capsys, arguments, words):
    assert _run(nine_cells, *arguments) == 2
    error = capsys.readouterr().err
    assert all(word in error for word in words), error
    assert "Traceback" not in error


def test_no_runs_and_duplicates_are_usage_errors(write_cell, tmp_path, capsys):
    assert main(["--output-dir", str(tmp_path)]) == 2
    assert "no runs" in capsys.readouterr().err
    write_cell(seed=0, hash8="0000abcd")
    write_cell(seed=0, hash8="1111abcd")
    assert _run(write_cell) == 2
    assert "1111abcd" in capsys.readouterr().err


def test_filters_that_match_nothing_together(nine_cells, capsys):
    nine_cells("sgld", 0, data="boston")
    assert _run(nine_cells, "--method", "sgld", "--data", "yacht") == 2
    assert "together" in capsys.readouterr().err


def test_scores_that_do_not_apply_draw_nothing(write_cell):
    """Planted bug: a figure of no panels, which ends in an error."""
    write_cell(scores=[{"metric": "ood_auroc", "value": "nan", "status": "n/a", "note": "one function"}])
    assert _run(write_cell) == 0
    assert not (write_cell.outputs / "results" / "comparison.png").exists()
