"""Runs, each killed at another moment of its life (see `killing`) and run again, have the numbers of a whole run."""

from __future__ import annotations

import csv
import json
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from tests.runs.killing import KINDS, MOMENTS, PHASES, cell_of


def numbers(folder: Path, finished: bool = False) -> dict[str, object]:
    """All numbers that a run leaves; not when it was, how long it took, and how often it was begun.

    The lease of a run that had `finished` when it was killed stays, since nothing is run again.
    """
    cell = cell_of(folder)
    found: dict[str, object] = {
        name: (cell / name).read_bytes()
        for name in ("metrics.csv", "evaluation.safetensors", "evaluation.json", "posterior.safetensors", "config.yaml")
    }
    rows = csv.DictReader((cell / "history.csv").read_text().splitlines())
    found["history"] = [{k: v for k, v in row.items() if k != "seconds"} for row in rows]
    facts = json.loads((cell / "cell.json").read_text())
    found["facts"] = {k: v for k, v in facts.items() if k not in ("attempts", "places")}
    found["networks"] = sorted(path.name for path in (folder / "cache" / "networks").iterdir())
    paths = [path for path in folder.rglob("*") if path.is_file() and not (finished and path.suffix == ".lease")]
    found["files"] = sorted(str(path.relative_to(folder)) for path in paths)
    return found


@pytest.mark.exhaustive
@pytest.mark.skipif(not hasattr(os, "fork"), reason="runs are forked")
@pytest.mark.parametrize("kinds", [["laplace"], pytest.param([*KINDS], marks=pytest.mark.exhaustive)], ids=len)
def test_kills_change_no_number(kinds: list[str], tmp_path: Path) -> None:
    """Planted bugs, each seen: files written in place; DONE before the last file; a resumed training or fit that
    begins with another order; lanes whose last ones are trained without those that were stored before the kill."""
    root = Path(__file__).parents[2]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(root)}
    command = [sys.executable, "-m", "tests.runs.killing", str(tmp_path), *kinds]
    done = subprocess.run(command, cwd=root, env=environment, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stderr
    killed = json.loads(done.stdout.splitlines()[-1])
    print(Counter(f"{k['kind']}: {k['phase']}" for k in killed))
    for k in killed:
        where = f"{k['kind']}, {k['phase']}, {k['event']}: {k['trouble']}"
        assert (k["killed"], k["again"], k["unreadable"]) == (-9, 0, []), where
        assert k["status"] != "done" or k["phase"] == "after", where
        whole = numbers(Path(k["folder"]).parent / "whole")
        for name, found in numbers(Path(k["folder"]), k["phase"] == "after").items():
            assert found == whole[name], f"{name} after {where}"
    phases = Counter(k["phase"] for k in killed)
    assert set(phases) > set(PHASES) and len(killed) >= (40 if len(kinds) > 1 else 10)
    assert min(phases[phase] for phase in PHASES) >= sum(MOMENTS[kind] for kind in kinds) - 1
