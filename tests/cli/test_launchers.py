"""Sweeps through launchers: worker processes of joblib, and a real Slurm of one node with a job queued again midway.

The Slurm test needs a running Slurm (scripts/local_slurm.sh start) and submitit; it is skipped elsewhere.
"""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

FICKLE = '''
import os
import time
from dataclasses import dataclass
from pathlib import Path

from bnn_runner.methods.map import MAP


@dataclass(frozen=True)
class Fickle:
    """Fails for seed 2. For seed 4 it waits to be stopped, once, where HOLD names a folder."""

    finite = True
    uses_hyper = False
    predictive = "draws"

    def problems(self, spec, hyper):
        return []

    def needs(self):
        return MAP().needs()

    def fit(self, task, networks, context):
        if context.seed == 2:
            raise ValueError("two is too much")
        hold = os.environ.get("HOLD")
        if context.seed == 4 and hold and not (Path(hold) / "held").exists():
            (Path(hold) / "writing").write_text(os.environ["SLURM_JOB_ID"])
            (Path(hold) / "writing").rename(Path(hold) / "held")
            for _ in range(600):
                context.progress("posterior", 0, 1)
                time.sleep(0.1)
        return MAP().fit(task, networks, context)
'''
SWEEP = [
    "--config-dir", "conf", "allow=[fickle]", "method=fickle", "data=gap1d", "schedule.epochs=3", "figures=false",
    "metric=[marginal,rmse]", "threads=1", "stack=never", "seed=range(6)",
]  # fmt: skip
PROGRAM = "import sys; sys.argv[0] = 'bnn-run'; from bnn_runner.cli.main import main; main()"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "fickle.py").write_text(FICKLE)
    path = tmp_path / "conf" / "method" / "fickle.yaml"
    path.parent.mkdir(parents=True)
    path.write_text("# a method that fails and waits\n_target_: fickle.Fickle\n")
    return tmp_path


def start(folder: Path, output: str, *words: str, **environment: str) -> subprocess.Popen[str]:
    env = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(Path(__file__).parents[2])} | environment
    command = [sys.executable, "-c", PROGRAM, "-m", *SWEEP, f"output_dir={output}", *words]
    return subprocess.Popen(command, cwd=folder, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, env=env)


def table(folder: Path, output: str) -> dict[str, str]:
    """Each cell's rows, or the first line of why it failed."""
    cells = [path.parent for path in folder.glob(f"{output}/runs/*/*/fickle/*/cell.json")]
    status = {c: (c / "FAILED").read_text().splitlines()[0] if (c / "FAILED").exists() else "" for c in cells}
    return {c.name: why or (c / "metrics.csv").read_text() for c, why in status.items()}


def check(told: str, code: int, found: dict[str, str]) -> None:
    assert code == 1, told
    assert "6 jobs: 5 done, 1 failed" in told and "two is too much" in told
    assert len(found) == 6 and sum("two is too much" in text for text in found.values()) == 1


def test_joblib_gives_the_table_of_a_plain_sweep(folder: Path) -> None:
    pytest.importorskip("hydra_plugins.hydra_joblib_launcher", reason="pip install -e '.[joblib]'")
    told = {}
    for output, words in {"plain": [], "workers": ["hydra/launcher=workers", "hydra.launcher.n_jobs=2"]}.items():
        with start(folder, output, *words) as process:
            _, told[output] = process.communicate(timeout=300)
        check(told[output], process.returncode, table(folder, output))
    assert table(folder, "plain") == table(folder, "workers")


def why_no_slurm() -> str:
    """Why the Slurm test cannot run; empty if it can."""
    if shutil.which("sinfo") is None:
        return "no Slurm is installed (scripts/local_slurm.sh install)"
    if subprocess.run(["sinfo", "-h"], capture_output=True, timeout=30).returncode != 0:
        return "no Slurm is running (scripts/local_slurm.sh start)"
    if importlib.util.find_spec("submitit") is None:
        return "submitit is not installed (pip install -e '.[slurm]')"
    return ""


def test_slurm_gives_the_table_of_a_plain_sweep_though_a_job_is_queued_again(folder: Path) -> None:
    if reason := why_no_slurm():
        pytest.skip(reason)
    words = ["hydra/launcher=slurm", "hydra.launcher.mem_gb=1", "hydra.launcher.timeout_min=30"]
    with start(folder, "slurm", *words, HOLD=str(folder)) as process:
        deadline = time.monotonic() + 300
        while not (folder / "held").exists() and process.poll() is None and time.monotonic() < deadline:
            time.sleep(0.2)
        subprocess.run(["scontrol", "requeue", (folder / "held").read_text()], check=True, timeout=30)
        _, told = process.communicate(timeout=300)
    check(told, process.returncode, table(folder, "slurm"))
    attempts = {
        p.parent.name[0]: json.loads(p.read_text())["attempts"] for p in folder.glob("slurm/runs/*/*/*/*/cell.json")
    }
    assert attempts == {str(seed): 2 if seed == 4 else 1 for seed in range(6)}
    with start(folder, "plain") as process:
        process.communicate(timeout=300)
    assert table(folder, "slurm") == table(folder, "plain")
