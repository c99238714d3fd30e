"""The real command, killed in training, fit and evaluation, and typed again: the same numbers at equal threads.

The package `fatal` stands outside of bnn_runner and kills its own process, once for each place, when
the environment variable FATAL names a folder for its marks; without it, it is an ordinary model and
an ordinary method.
"""

from __future__ import annotations

import csv
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

FATAL = '''
import os
import signal
from dataclasses import dataclass, replace
from pathlib import Path

from bnn_runner.training import engine as training
from bnn_runner.methods.laplace import Laplace
from bnn_runner.models.mlp import MLPNetwork

training.CHECKPOINT_SECONDS = 0.0  # a checkpoint after every epoch, so that there is one to go on from


def once(place, number=signal.SIGKILL):
    """Kill this process, if FATAL asks for it and it was not done before; whether it did."""
    folder = os.environ.get("FATAL")
    if folder is not None and place in os.environ["PLACES"].split() and not (Path(folder) / place).exists():
        (Path(folder) / place).touch()
        os.kill(os.getpid(), number)
        return True
    return False


class FragileNetwork(MLPNetwork):
    steps = 0

    def forward(self, x):
        checkpoints = os.environ.get("CHECKPOINTS")
        if self.training and len(x) > 8 and checkpoints is not None and any(Path(checkpoints).glob("*.pt")):
            FragileNetwork.steps += 1
            if FragileNetwork.steps == 7:  # in the middle of an epoch; probes of a network take at most 8 points
                once("interrupt", signal.SIGINT) or once("training")
        return super().forward(x)


@dataclass(frozen=True)
class Fragile:
    width: int

    def problems(self, spec):
        return []

    def build(self, spec):
        return FragileNetwork([spec.input_shape[0], self.width], spec.num_outputs, "relu", "batch", False)


@dataclass(frozen=True)
class FragileDraws:
    inner: object
    log_weights = property(lambda self: self.inner.log_weights)
    floats_per_draw = property(lambda self: self.inner.floats_per_draw)
    likelihood = property(lambda self: self.inner.likelihood)

    def __len__(self):
        return len(self.inner)

    def __getitem__(self, part):
        return FragileDraws(self.inner[part])

    def __call__(self, x):
        if len(self) > 2 and len(x) < 8:  # the last batch of the test set
            once("evaluation")
        return self.inner(x)


@dataclass(frozen=True)
class FragilePosterior:
    inner: object
    finite = False
    likelihood = property(lambda self: self.inner.likelihood)
    report = property(lambda self: self.inner.report)
    treatment = property(lambda self: self.inner.treatment)

    def draws(self, num_draws, seed):
        return FragileDraws(self.inner.draws(num_draws, seed))


@dataclass(frozen=True)
class FragileLaplace:
    structure: str
    finite = False
    uses_hyper = True
    predictive = "draws"

    def problems(self, spec, hyper):
        return []

    def needs(self):
        return Laplace().needs()

    def fit(self, task, networks, context):
        def progress(stage, done, total):
            context.progress(stage, done, total)
            if done == total:
                once("fit")

        inner = Laplace(structure=self.structure)
        return FragilePosterior(inner.fit(task, networks, replace(context, progress=progress)))
'''
CHOICES = {
    "model/fragile.yaml": "# a network that may kill its process\n_target_: fatal.Fragile\nwidth: 6\n",
    "method/fragile.yaml": "# a method that may kill its process\n_target_: fatal.FragileLaplace\nstructure: kfac\n",
}
OVERRIDES = [
    "allow=[fatal]", "data=gap1d", "model=fragile", "method=fragile", "data.num_train=60", "data.num_test=30",
    "schedule.epochs=8", "schedule.batch_size=16", "schedule.lr=0.02", "eval.num_draws=12", "eval.batch_size=8",
    "metric=[marginal,joint,rmse]", "figures=false", "threads=1",
]  # fmt: skip
PROGRAM = "import sys; sys.argv[0] = 'bnn-run'; from bnn_runner.cli.main import main; main()"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("fragile")
    (root / "fatal.py").write_text(FATAL)
    for name, text in CHOICES.items():
        path = root / "conf" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


def bnn_run(folder: Path, output: str, *overrides: str, places: str = "") -> subprocess.CompletedProcess[str]:
    """One process of the real command; it dies at each of the named places that it has not died at before."""
    marks = folder / f"marks {output}"
    marks.mkdir(exist_ok=True)
    environment = os.environ | {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE"}
    if places:
        environment |= {
            "FATAL": str(marks),
            "PLACES": places,
            "CHECKPOINTS": str(folder / output / "cache" / "partial"),
        }
    words = ["--config-dir", str(folder / "conf"), *OVERRIDES, f"output_dir={output}", *overrides]
    command = [sys.executable, "-c", PROGRAM, *words]
    return subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, timeout=300, check=False
    )


def cell(folder: Path, output: str) -> Path:
    [found] = [p for p in (folder / output / "runs" / "gap1d" / "fragile" / "fragile").iterdir() if p.is_dir()]
    return found


@pytest.fixture(scope="module")
def undisturbed(folder: Path) -> Path:
    done = bnn_run(folder, "undisturbed")
    assert done.returncode == 0, done.stderr + done.stdout
    found = cell(folder, "undisturbed")
    assert (found / "DONE").is_file()
    return found


def _assert_same_numbers(found: Path, expected: Path) -> None:
    assert (found / "metrics.csv").read_bytes() == (expected / "metrics.csv").read_bytes()
    histories = []
    for folder in (found, expected):
        rows = csv.DictReader((folder / "history.csv").read_text().splitlines())
        histories.append([{k: v for k, v in row.items() if k != "seconds"} for row in rows])
    assert histories[0] == histories[1] and len(histories[0]) == 8
    reports = [json.loads((c / "cell.json").read_text()) for c in (found, expected)]
    assert reports[0]["report"] == reports[1]["report"] and reports[0]["hash"] == reports[1]["hash"]
    assert {p.name for p in found.iterdir()} >= {
        "DONE",
        "metrics.csv",
        "evaluation.safetensors",
        "provenance.json",
        "command.txt",
    }
    assert not (found / "INTERRUPTED").exists() and not (found / "FAILED").exists()


@pytest.mark.exhaustive
def test_a_run_that_is_cut_everywhere_ends_with_the_same_numbers(folder: Path, undisturbed: Path) -> None:
    """Ctrl-C in training, then SIGKILL in training, in the fit and in the evaluation, the same command each time.

    Planted bugs: a resumed training with another order of points; a half-written or interrupted cell taken for a
    finished one; a dead process's lease waited for; draws that depend on what ran before; a traceback for Ctrl-C."""
    places = "interrupt training fit evaluation"
    for number, place in enumerate(places.split(), 1):
        died = bnn_run(folder, "cut", places=places)
        told = died.stdout + died.stderr
        assert died.returncode == (130 if place == "interrupt" else -signal.SIGKILL), told
        assert sorted(p.name for p in (folder / "marks cut").iterdir()) == sorted(places.split()[:number]), place
        partial, networks = (
            sorted((folder / "cut" / "cache" / name).glob(end))
            for name, end in (("partial", "*.pt"), ("networks", "*.safetensors"))
        )
        in_training = place in ("interrupt", "training")
        assert (len(partial), len(networks)) == ((1, 0) if in_training else (0, 1)), place
        assert ("nothing to train" in told) is (place == "evaluation")
        assert ("resuming from a checkpoint" in told) is (place in ("training", "fit"))
        found = cell(folder, "cut")
        assert not (found / "DONE").exists() and not (found / "FAILED").exists()
        if place == "interrupt":
            assert "Traceback" not in told and "of 8 epochs" in (found / "INTERRUPTED").read_text()
            assert "Run the same command again to resume" in died.stderr
    finished = bnn_run(folder, "cut", places=places)
    assert finished.returncode == 0, finished.stderr + finished.stdout
    assert "nothing to train" in finished.stdout
    _assert_same_numbers(cell(folder, "cut"), undisturbed)
    assert list((folder / "cut").rglob("*.lease")) == []


@pytest.mark.exhaustive
def test_a_diverging_run_fails_with_its_reason(folder: Path) -> None:
    """Planted bug (PITFALLS A14): NaN in the table and exit code 0."""
    failed = bnn_run(
        folder,
        "diverged",
        "method=map",
        "model=mlp",
        "model.hidden=[6]",
        "schedule=sgd",
        "schedule.lr=1e6",
        "schedule.warmup_epochs=0",
    )
    assert failed.returncode == 1, failed.stderr + failed.stdout
    [found] = (folder / "diverged" / "runs" / "gap1d" / "mlp" / "map").iterdir()
    first, *rest = (found / "FAILED").read_text().splitlines()
    assert "loss became" in first and "schedule.lr" in first and "1000000.0" in first
    assert any("Traceback" in line for line in rest)
    assert "FAILED" in failed.stdout and "Traceback" not in failed.stdout + failed.stderr
    assert not (found / "DONE").exists() and not (found / "metrics.csv").exists()
    assert not list((folder / "diverged" / "cache").rglob("*.safetensors"))
