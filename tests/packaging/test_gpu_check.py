"""scripts/gpu_check.sh runs without a card: its smoke mode, at tiny sizes."""

from __future__ import annotations

import csv
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def check(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"BNN_DEVICE": "cpu", "PYTHON": sys.executable, "RESULTS": str(folder / "results")}
    environment.pop("WHEELS", None)
    return subprocess.run(
        ["bash", str(ROOT / "scripts" / "gpu_check.sh"), *words],
        env=environment,
        cwd=folder,
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.mark.exhaustive
def test_a_stage_leaves_its_line_in_the_table(tmp_path: Path) -> None:
    """Planted bugs: a stage that needs data or a card to be tried; a table that loses the stages of earlier calls; a
    method without a file that ends the check."""
    done = check(tmp_path, "mnist", "--dry")
    assert done.returncode == 0, done.stdout + done.stderr
    absent = check(tmp_path, "kappa:no_such_method", "--dry")
    assert absent.returncode == 0, absent.stdout + absent.stderr
    rows = list(csv.DictReader((tmp_path / "results" / "gpu_check.csv").read_text().splitlines()))
    assert [row["stage"] for row in rows] == ["mnist", "kappa"]
    assert rows[0]["status"] == "ok" and "posterior" in rows[0]["detail"] and "MiB" in rows[0]["detail"]
    assert rows[1]["status"].startswith("not available") and all(row["device"] for row in rows)
    assert "| mnist | laplace_kfac | ok |" in (tmp_path / "results" / "gpu_check.md").read_text()
    assert check(tmp_path, "everything").returncode == 2
