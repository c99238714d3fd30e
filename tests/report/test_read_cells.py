import dataclasses
import json
import math
import os
import subprocess
import sys

import pytest

from bnn_runner.errors import UserError
from bnn_runner.report.read_cells import ScoreRow, find_cells, read_cell, read_scores
from bnn_runner.report.tables import build


def test_score_rows_have_the_fields_of_score():
    """Catches a field added to base.Score that reports would lose."""
    from bnn_runner.scoring import Score

    theirs = [f for f in dataclasses.fields(Score) if f.name != "points"]  # that is in points.npz
    assert list(ScoreRow._fields) == [f.name for f in theirs]
    defaults = [ScoreRow._field_defaults[f.name] for f in theirs[2:]]
    assert defaults == pytest.approx([f.default for f in theirs[2:]], nan_ok=True)


def test_every_status_is_read(write_cell):
    write_cell(seed=0)
    write_cell(seed=1, status="FAILED", scores=None, reason="\nthe loss is nan\nTraceback ...")
    write_cell(seed=2, status="INTERRUPTED", scores=None, reason="SIGTERM at epoch 3")
    write_cell(seed=3, status=None, scores=None)
    cells = {c.seed: c for c in find_cells(write_cell.outputs)}
    assert [cells[s].status for s in range(4)] == ["done", "failed", "interrupted", "unfinished"]
    assert cells[1].reason == "the loss is nan"
    assert cells[2].reason == "SIGTERM at epoch 3"


@pytest.mark.parametrize(
    ("damage", "word"),
    [
        (lambda f: (f / "metrics.csv").unlink(), "metrics.csv"),
        (lambda f: (f / "metrics.csv").write_text(""), "no column"),
        (lambda f: (f / "metrics.csv").write_text("metric,value,split,status\nrmse,1.0,te"), "incomplete"),
        (lambda f: (f / "metrics.csv").write_text("metric,value,split,status\nrmse,1.0.3,test,ok\n"), "not a number"),
        (lambda f: (f / "metrics.csv").write_text("metric,value,split,status\nr,1,test,ok\nr,2,test,ok\n"), "twice"),
        (lambda f: (f / "metrics.csv").write_bytes(b"\xff\xfe\x00garbage"), "metrics.csv"),
        (lambda f: (f / "cell.json").write_text('{"data": "yacht", "mod'), "cell.json"),
        (lambda f: (f / "cell.json").write_text("[]"), "cell.json"),
        (lambda f: (f / "cell.json").unlink(), "cell.json"),
        (lambda f: f.rename(f.with_name("7-0000abcd")), "copied"),
    ],
)
def test_a_damaged_cell_is_listed_and_left_out(write_cell, damage, word):
    write_cell(seed=0)
    damage(write_cell(seed=1))
    cells = find_cells(write_cell.outputs)
    assert sorted(c.status for c in cells) == ["damaged", "done"]
    table = build(cells)
    assert [row.n for row in table.rows] == [1]
    assert any("damaged" in note and word in note for note in table.notes)


def test_half_written_cell_of_a_running_job_is_no_damage(write_cell):
    folder = write_cell(seed=1, status=None)
    (folder / "cell.json").write_text('{"data": "ya')
    assert read_cell(folder).status == "unfinished"


def test_newest_status_counts(write_cell):
    folder = write_cell(seed=0)
    (folder / "FAILED").write_text("an earlier attempt")
    os.utime(folder / "FAILED", (1, 1))
    assert read_cell(folder).status == "done"
    os.utime(folder / "DONE", (0, 0))
    assert read_cell(folder).status == "failed"


def test_other_peoples_folders_are_ignored(write_cell):
    write_cell()
    (write_cell.outputs / "runs/yacht/mlp/map/notes").mkdir()
    assert len(find_cells(write_cell.outputs)) == 1


def test_no_scores_is_no_damage(write_cell):
    """A metric that does not fit the task gives none."""
    (cell,) = [read_cell(write_cell(scores=[]))]
    assert (cell.status, cell.scores) == ("done", ())


def test_empty_value_is_nan(nine_cells):
    nine_cells("map", 7, [{"metric": "rmse", "value": ""}], hash8="0000abcd")
    (cell,) = [c for c in find_cells(nine_cells.outputs) if c.seed == 7]
    assert math.isnan(cell.scores[0].value)


def test_blanks_after_commas_are_no_part_of_a_word(tmp_path):
    """As a person who edits the table may leave them. Planted bug: a score whose split is " test"."""
    (tmp_path / "metrics.csv").write_text("metric, value, split, status\nrmse, 1.5, test, ok\n")
    (score,) = read_scores(tmp_path / "metrics.csv")
    assert score == ScoreRow("rmse", 1.5, score.standard_error, split="test", status="ok")


def test_duplicate_is_refused_with_both_paths(write_cell):
    first = write_cell(seed=0, hash8="0000abcd")
    second = write_cell(seed=0, hash8="1111abcd", config={"output_dir": "elsewhere", "device": "cpu"})
    with pytest.raises(UserError) as error:
        build(find_cells(write_cell.outputs))
    assert str(first) in str(error.value)
    assert str(second) in str(error.value)


def test_reading_needs_no_torch():
    code = "import sys, bnn_runner.cli.report, bnn_runner.report.comparison, bnn_runner.report.console; "
    code += "print([m for m in ('torch', 'pandas', 'matplotlib', 'hydra', 'numpy') if m in sys.modules])"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert json.loads(found.stdout.replace("'", '"')) == []
