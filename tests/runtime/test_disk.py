"""A full disk and a folder that may not be written: told with what to do, and nothing is lost."""

from __future__ import annotations

import contextlib
import errno
import io
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from bnn_runner import runner
from bnn_runner.experiment import Experiment, load_experiment
from bnn_runner.runtime.console import Console

WORDS = [
    "method=laplace_kfac", "data=gap1d", "data.num_train=40", "data.num_test=16", "model.hidden=[5]", "threads=1",
    "schedule.epochs=3", "eval.num_draws=8", "figures=false", "metric=[marginal]", "time_limit=null",
]  # fmt: skip
PROGRAM = "import sys; sys.argv[0] = 'bnn-run'; from bnn_runner.cli.main import main; main()"


def run(experiment: Experiment) -> tuple[str, str, Path]:
    """Status, message and cell of a run in this process."""
    told = io.StringIO()
    outcome = runner.run(experiment, Console(told))
    assert "Traceback" not in told.getvalue()
    return outcome.status, outcome.message, outcome.cells[0]


def test_the_disk_is_full_at_every_single_write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The disk is full from the first write on, then from the second, and so on: each time the run goes on from what
    is there. Planted bugs: DONE on top of a missing file; a temporary file that stays; a traceback for a full disk."""
    undisturbed, disturbed = (
        load_experiment([*WORDS, "save_posterior=true"], None, tmp_path / name) for name in ("whole", "full")
    )
    status, _, whole = run(undisturbed)
    assert status == "done"
    fsync, left = os.fsync, 0

    def full(descriptor: int) -> None:
        nonlocal left
        left -= 1
        if left < 0:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", full)
    tries, status = 0, ""
    while status != "done":
        left = tries
        try:
            status, message, cell = run(disturbed)
        except runner.RunFailed as error:  # before a cell could be begun
            status, message = "failed", str(error)
        tries += 1
        if status != "done":
            assert "the disk is full" in message and "run the same command again" in message
            assert not list((tmp_path / "full").rglob("DONE")) and not list((tmp_path / "full").rglob(".*"))
        assert tries < 40
    assert tries > 12, "the network, and every file of a cell"
    for name in ("metrics.csv", "evaluation.safetensors", "posterior.safetensors", "config.yaml"):
        assert (cell / name).read_bytes() == (whole / name).read_bytes()
    assert sorted(p.name for p in cell.iterdir()) == sorted({p.name for p in whole.iterdir()})


@pytest.fixture
def small(tmp_path: Path) -> Iterator[Path]:
    """A file system of two mebibytes."""
    folder = tmp_path / "small"
    folder.mkdir()
    made = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=2m", "tmpfs", str(folder)], capture_output=True)
    if made.returncode != 0:
        pytest.skip("a file system can be mounted by root only")
    yield folder
    subprocess.run(["umount", "-l", str(folder)], check=True)


@pytest.mark.skipif(sys.platform != "linux" or not Path("/bin/mount").exists(), reason="mounts a file system")
@pytest.mark.exhaustive
def test_a_full_and_a_read_only_file_system(small: Path) -> None:
    def bnn_run(*words: str) -> tuple[int, str]:
        env = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(Path(__file__).parents[2])}
        command = [sys.executable, "-c", PROGRAM, *words, *WORDS, "output_dir=out"]
        done = subprocess.run(command, cwd=small, capture_output=True, text=True, env=env, timeout=300, check=False)
        assert "Traceback" not in done.stdout + done.stderr
        return done.returncode, done.stdout + done.stderr

    assert bnn_run("seed=0")[0] == 0
    [cell] = small.glob("out/runs/*/*/*/0-*")
    before = {path.name: path.read_bytes() for path in cell.iterdir()}
    with (small / "ballast").open("wb", buffering=0) as file, contextlib.suppress(OSError):
        while True:
            file.write(bytes(1024))
    code, told = bnn_run("-m", "seed=0,1")
    assert code == 1 and "the disk is full" in told and "run the same command again" in told
    assert {path.name: path.read_bytes() for path in cell.iterdir()} == before
    (small / "ballast").unlink()
    subprocess.run(["mount", "-o", "remount,ro", str(small)], check=True)
    code, told = bnn_run("-m", "seed=0,1")
    assert code == 2 and "Read-only file system" in told
    subprocess.run(["mount", "-o", "remount,rw", str(small)], check=True)
    code, told = bnn_run("-m", "seed=0,1")
    assert code == 0 and "2 jobs: 1 done, 1 done before" in told
    assert {path.name: path.read_bytes() for path in cell.iterdir()} == before
