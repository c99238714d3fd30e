"""No path of the machine stands in what the commands print, in a report's files, or in the kept results."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from bnn_runner.cli import main as bnn_run
from bnn_runner.cli import report as bnn_report

ROOT = Path(__file__).parents[2]
KEPT = ROOT / "outputs" / "results"
SMALL = [
    "data.num_train=30", "data.num_test=20", "model.hidden=[5]", "schedule.epochs=3", "eval.num_draws=8",
    "metric=[marginal]",
]  # fmt: skip
DIVERGES = ["method=map", "schedule=sgd", "schedule.epochs=20", "schedule.lr=1e6", "schedule.warmup_epochs=0"]
MACHINE = re.compile(r"(?<![\w.<])/(home|root|Users|tmp|var|mnt|work|data|private)/")
"""The beginning of an absolute path."""
TEXT = (".md", ".csv", ".tex", ".html")


def lines_with(text: str, *paths: Path) -> list[str]:
    return [line[:300] for line in text.splitlines() if any(str(path) in line for path in paths)]


def test_the_kept_results_have_none() -> None:
    files = [path for path in KEPT.iterdir() if path.suffix in TEXT]
    assert len(files) > 60
    found = {
        path.name: lines
        for path in files
        if (lines := [line[:300] for line in path.read_text(encoding="utf-8").splitlines() if MACHINE.search(line)])
    }
    assert not found, found


@pytest.mark.exhaustive
def test_runs_a_sweep_with_a_failure_and_a_report_have_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Planted bugs: a cell's absolute folder in the summary of a sweep; the data folder in the commands of a report."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    places = tmp_path, Path.cwd(), ROOT, Path.home()
    assert bnn_run.run(SMALL) == 0
    assert bnn_run.run(["-m", *SMALL, *DIVERGES, "seed=1"]) == 1
    assert bnn_report.main(["--no-figure"]) == 0
    printed = capfd.readouterr()
    assert (
        "missing results:" in printed.out
        and "FAILED" in printed.out
        and "bands.png" in printed.out
        and "log.txt" in printed.err
    )
    assert not lines_with(printed.out + printed.err, *places)
    files = [path for path in (tmp_path / "outputs" / "results").iterdir() if path.suffix in TEXT]
    assert {path.suffix for path in files} == set(TEXT)
    for path in files:
        assert not lines_with(path.read_text(encoding="utf-8"), *places), path.name
