"""`bnn-prune` on a finished run: the table, the files, and mistakes."""

from __future__ import annotations

import csv
from pathlib import Path

import pytest

from bnn_runner import api
from bnn_runner.cli.prune import main


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("prune")
    words = [
        "data=two_moons", "model.hidden=[10]", "schedule.epochs=40", "eval.num_draws=20", "metric=[accuracy,marginal]",
        "figures=false", "save_posterior=true", f"output_dir={root}",
    ]  # fmt: skip
    return {m: api.run([*words, f"method={m}"], quiet=True).folder for m in ("bbb", "map")}


def _rows(path: Path) -> list[dict[str, str]]:
    with path.open(encoding="utf-8") as file:
        return list(csv.DictReader(file))


def test_pruning_writes_its_table_and_figure(folders: dict[str, Path], capsys: pytest.CaptureFixture[str]) -> None:
    """Planted bugs: other draws than the run's at 0 %; percent taken for a fraction; removed weights counted."""
    folder = folders["bbb"]
    assert main([str(folder), "--fractions", "0,50,100"]) == 0
    rows = _rows(folder / "pruning.csv")
    assert [float(r["removed_percent"]) for r in rows] == [0, 50, 100]
    total = 2 * 10 + 10 + 10 * 2 + 2
    assert [int(r["weights_left"]) for r in rows] == [total, total // 2, 0]
    scores = {r["metric"]: r for r in _rows(folder / "metrics.csv") if r["split"] == "test"}
    assert float(rows[0]["error"]) == pytest.approx(100 * (1 - float(scores["accuracy"]["value"])), abs=1e-9)
    assert float(rows[0]["loglik"]) == pytest.approx(float(scores["marginal_loglik"]["value"]), abs=1e-9)
    assert float(rows[2]["loglik"]) == pytest.approx(-0.693147, abs=1e-5), "nothing left: one half for each class"
    for row in rows:
        assert float(row["cost"]) == pytest.approx(float(row["error"]) - float(rows[0]["error"]), abs=1e-9)
    ends, apart = (float(rows[k]["error_standard_error"]) for k in (0, 2)), float(rows[2]["cost_standard_error"])
    assert float(rows[0]["cost_standard_error"]) == 0 < apart <= sum(ends)
    assert main([str(folder), "--fractions", "50"]) == 0
    assert _rows(folder / "pruning.csv") == [rows[1]], "the cost does not need 0 among the fractions"
    assert main([str(folder), "--fractions", "0,50,100"]) == 0
    assert (folder / "figures" / "pruning.png").stat().st_size > 5000
    assert "weights left" in capsys.readouterr().out


def test_mistakes_are_told(folders: dict[str, Path], capsys: pytest.CaptureFixture[str]) -> None:
    """Planted bug: a traceback for a run of another method."""
    assert main([str(folders["map"])]) == 2
    assert "factorised Gaussian" in capsys.readouterr().err
    assert main([str(folders["bbb"]), "--fractions", "0,150"]) == 2
    assert "percentages" in capsys.readouterr().err
