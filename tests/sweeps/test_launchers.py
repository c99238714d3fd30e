"""Sweeps through launchers: processes of this machine, Ray, and a real Slurm with a job queued again midway.

The Slurm test needs a running Slurm (scripts/local_slurm.sh start) and submitit, Ray's needs Ray; both are skipped
elsewhere.
"""

from __future__ import annotations

import importlib.util
import itertools
import json
import os
import shutil
import signal
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
    """Fails for seed 2. For seed 4 it waits to be stopped, once, where HOLD names a folder.

    Where GPUS names a folder, it writes there which GPU it saw from when to when.
    """

    finite = True
    uses_hyper = False
    predictive = "draws"

    def problems(self, spec, hyper):
        return []

    def needs(self):
        return MAP().needs()

    def fit(self, task, networks, context):
        if folder := os.environ.get("GPUS"):
            begun = time.time()
            time.sleep(0.3)
            seen = f"{os.environ['CUDA_VISIBLE_DEVICES']} {begun} {time.time()}"
            (Path(folder) / f"{context.seed}.gpu").write_text(seen)
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


def furnish(path: Path) -> Path:
    (path / "fickle.py").write_text(FICKLE)
    choice = path / "conf" / "method" / "fickle.yaml"
    choice.parent.mkdir(parents=True)
    choice.write_text("# a method that fails and waits\n_target_: fickle.Fickle\n")
    return path


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return furnish(tmp_path)


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The table of a plain sweep."""
    path = furnish(tmp_path_factory.mktemp("plain"))
    with start(path, "plain") as process:
        _, told = process.communicate(timeout=300)
    check(told, process.returncode, table(path, "plain"))
    return table(path, "plain")


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


@pytest.mark.exhaustive
def test_workers_give_the_table_of_a_plain_sweep_each_on_a_gpu_of_its_own(folder: Path, plain: dict[str, str]) -> None:
    words = ["hydra/launcher=workers", "hydra.launcher.n_jobs=3", "hydra.launcher.gpus=[7,GPU-5]"]
    with start(folder, "workers", *words, GPUS=str(folder)) as process:
        _, told = process.communicate(timeout=300)
    check(told, process.returncode, table(folder, "workers"))
    assert table(folder, "workers") == plain

    seen = sorted(path.read_text().split() for path in folder.glob("*.gpu"))
    assert len(seen) == 6 and {gpu for gpu, _, _ in seen} == {"7", "GPU-5"}
    for (gpu, _, end), (other, begin, _) in itertools.pairwise(sorted(seen, key=lambda s: (s[0], float(s[1])))):
        assert gpu != other or float(end) <= float(begin), "two jobs had one GPU at a time"


@pytest.mark.exhaustive
def test_workers_asked_to_stop_save_their_state(folder: Path) -> None:
    words = ["schedule.epochs=200000", "time_limit=null", "hydra/launcher=workers", "hydra.launcher.n_jobs=2"]
    with start(folder, "out", *words) as process:
        while len(list(folder.glob("out/runs/*/*/*/*/cell.json"))) < 2 and process.poll() is None:
            time.sleep(0.1)
        process.send_signal(signal.SIGTERM)
        _, told = process.communicate(timeout=60)
    assert process.returncode == 130 and "6 jobs: 2 interrupted, 4 no result" in told
    assert len(list(folder.glob("out/runs/*/*/*/*/INTERRUPTED"))) == 2


@pytest.mark.exhaustive
def test_ray_gives_the_table_of_a_plain_sweep(folder: Path, plain: dict[str, str]) -> None:
    pytest.importorskip("ray", reason="pip install -e '.[ray]'")
    with start(folder, "ray", "hydra/launcher=ray", "hydra.launcher.cpus=2") as process:
        _, told = process.communicate(timeout=300)
    check(told, process.returncode, table(folder, "ray"))
    assert table(folder, "ray") == plain


@pytest.mark.parametrize(
    ("words", "hint"),
    [
        (["hydra/launcher=worker"], "hydra/launcher=worker is unknown. Did you mean workers?"),
        (["hydra/launcher=workers", "hydra.launcher.gpus=[]"], "hydra.launcher.gpus must list at least one GPU"),
        (["hydra/launcher=ray"], "pip install 'bnn-runner[ray]'"),
    ],
)
def test_a_launcher_that_cannot_be_had_is_a_mistake(folder: Path, words: list[str], hint: str) -> None:
    program = "import sys; sys.modules['ray'] = None\n" + PROGRAM
    command = [sys.executable, "-c", program, "-m", "seed=0,1", *words]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=120)
    assert done.returncode == 2 and "1 error, nothing was run" in done.stderr and hint in done.stderr


def why_no_slurm() -> str:
    """Why the Slurm test cannot run; empty if it can."""
    if shutil.which("sinfo") is None:
        return "no Slurm is installed (scripts/local_slurm.sh install)"
    if subprocess.run(["sinfo", "-h"], capture_output=True, timeout=30).returncode != 0:
        return "no Slurm is running (scripts/local_slurm.sh start)"
    if importlib.util.find_spec("submitit") is None:
        return "submitit is not installed (pip install -e '.[slurm]')"
    return ""


@pytest.mark.exhaustive
def test_slurm_gives_the_table_of_a_plain_sweep_though_a_job_is_queued_again(
    folder: Path, plain: dict[str, str]
) -> None:
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
    assert table(folder, "slurm") == plain
