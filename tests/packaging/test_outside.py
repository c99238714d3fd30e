"""Adding is cheap, from outside and from inside.

A method, a data set, a model, a metric and a rule for the prior precision from outside the package are one Python file
and one YAML file each; a report section inside is one file and its name in the table of sections.
"""

from __future__ import annotations

import csv
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest

from bnn_runner.cli.main import run
from bnn_runner.testing import check_choice, check_data, check_method, check_metric, check_model, check_rule

ROOT = Path(__file__).parents[2]

FILES = {
    "stairs.py": '''
from dataclasses import dataclass

import torch

from bnn_runner.tasks import TaskSpec
from bnn_runner.data.splits import Sizes, divide
from bnn_runner.data.tables import table_task
from bnn_runner.rng import generator


@dataclass(frozen=True)
class Stairs:
    """One input, a step for each unit."""

    num_points: int
    val_fraction: float
    train_size: int | None
    test_size: int | None

    def spec(self):
        return TaskSpec("stairs", "regression", (1,), 1, self.val_fraction)

    def load(self, data_dir, seed):
        x = 4 * torch.rand(self.num_points, 1, generator=generator(seed, "stairs"), dtype=torch.float64)
        rows, half = torch.arange(self.num_points), self.num_points // 2
        sizes = Sizes(self.val_fraction, self.train_size, self.test_size)
        return table_task(self.spec(), x, x.floor(), divide(rows[:half], rows[half:], sizes, seed, None, None))
''',
    "conf/data/stairs.yaml": """
# a staircase
_target_: stairs.Stairs
num_points: 80
val_fraction: 0.1
train_size: null
test_size: null
recommended:
  model: waves
  schedule: adam
  values:
    schedule.epochs: 30
    eval.num_draws: 16
""",
    "waves.py": '''
from dataclasses import dataclass

import torch
from torch import nn


@dataclass(frozen=True)
class Waves:
    """A line over sines of the inputs."""

    frequencies: int

    def problems(self, spec):
        return [] if len(spec.input_shape) == 1 else [f"model=waves reads rows, and data={spec.name} has images."]

    def build(self, spec):
        first, last = nn.Linear(spec.input_shape[0], self.frequencies), nn.Linear(self.frequencies, spec.num_outputs)
        return nn.Sequential(first, Sine(), last)


class Sine(nn.Module):
    def forward(self, x):
        return torch.sin(x)
''',
    "conf/model/waves.yaml": """
# sines
_target_: waves.Waves
frequencies: 8
""",
    "coin.py": '''
from dataclasses import dataclass
from typing import ClassVar

from bnn_runner.base import FitReport, TrainingSpec
from bnn_runner.posteriors.networks import NetworkEnsemble


@dataclass(frozen=True)
class Coin:
    """The MAP network and one other."""

    other: int
    finite: ClassVar[bool] = True
    uses_hyper: ClassVar[bool] = False
    predictive: ClassVar[str] = "draws"

    def problems(self, spec, hyper):
        return []

    def needs(self):
        return [TrainingSpec(0), TrainingSpec(self.other)]

    def fit(self, task, networks, context):
        return NetworkEnsemble(tuple(networks), FitReport({"other": self.other}))
''',
    "conf/method/coin.yaml": """
# two networks
_target_: coin.Coin
other: 7
""",
    "worst.py": '''
from dataclasses import dataclass

from bnn_runner.scoring import Score


@dataclass(frozen=True)
class Worst:
    """The largest squared error of the mean of means, over the first `points`."""

    points: int

    def __call__(self, evaluation, seed):
        test = evaluation.test
        if test.means is None:
            return []
        errors = (test.means.mean(0) - test.targets).square()[: self.points]
        return [Score("worst_squared_error", float(errors.max()), n=len(errors), better="lower", unit="squared")]
''',
    "conf/metric/worst.yaml": """
# @package metric.worst
# the largest squared error
_target_: worst.Worst
points: 20
""",
    "double.py": '''
from dataclasses import dataclass
from typing import ClassVar

from bnn_runner.base import Choice


@dataclass(frozen=True)
class Double:
    """A multiple of the training prior's precision."""

    factor: float
    needs_validation: ClassVar[bool] = False

    def choose(self, problem):
        return Choice(self.factor * problem.start, "fixed", {"factor": self.factor})
''',
    "conf/hyper/double.yaml": """
# a multiple of the training prior
_target_: double.Double
factor: 2.0
""",
}
KINDS = {"data": "stairs", "model": "waves", "method": "coin", "metric": "worst", "hyper": "double"}
MODULES = tuple(KINDS.values())
ALONE = {
    "data": ["data=stairs", "model=mlp", "method=map"],
    "model": ["model=waves", "method=map"],
    "method": ["method=coin"],
    "metric": ["method=map", "metric=[worst]"],
    "hyper": ["method=laplace", "hyper=double"],
}
"""A command for each kind of addition, the rest built in."""
WORDS = ["--config-dir", "mine/conf", f"allow=[{','.join(MODULES)}]", "data=stairs", "method=coin", "figures=false"]


def write(folder: Path, names: Iterable[str]) -> None:
    for name in names:
        path = folder / "mine" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(FILES[name].lstrip(), encoding="utf-8")


@pytest.fixture
def empty(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.chdir(tmp_path)
    before = list(sys.path)
    yield tmp_path
    sys.path[:] = before
    for module in MODULES:
        sys.modules.pop(module, None)


@pytest.fixture
def here(empty: Path) -> Path:
    write(empty, FILES)
    return empty


@pytest.mark.parametrize("group", KINDS)
def test_one_of_them_is_two_files(group: str, empty: Path) -> None:
    """One Python file and one YAML file, alone in their folder; the package is as it is installed."""
    module = KINDS[group]
    files = [f"{module}.py", f"conf/{group}/{module}.yaml"]
    write(empty, files)
    assert {p.relative_to(empty / "mine").as_posix() for p in empty.rglob("*.*") if p.is_file()} == set(files)
    small = ["schedule.epochs=3", "eval.num_draws=8", "figures=false"]
    assert run(["--config-dir", "mine/conf", f"allow=[{module}]", *ALONE[group], *small]) == 0
    assert len(list(empty.glob("outputs/runs/*/*/*/*/DONE"))) == 1


def test_all_of_them_keep_the_contracts(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What their own tests would call."""
    monkeypatch.syspath_prepend(here / "mine")

    def built(group: str, **changes: Any) -> Any:
        return check_choice("mine/conf", group, KINDS[group], allow=MODULES, **changes)

    check_data(built("data", train_size=20, test_size=15))
    check_model(built("model"))
    check_method(built("method"), allow=MODULES)
    check_metric(built("metric"))
    assert check_rule(built("hyper")).precisions.tolist() == [2.0, 2.0]


def test_all_of_them_run_and_are_scored(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(WORDS) == 0
    assert "worst_squared_error" in capsys.readouterr().out
    [cell] = here.glob("outputs/runs/stairs/waves/coin/0-*")
    assert (cell / "DONE").is_file()
    facts = json.loads((cell / "cell.json").read_text())
    assert facts["config"]["schedule.epochs"] == 30 and facts["report"]["other"] == 7
    rows = {row["metric"]: row for row in csv.DictReader((cell / "metrics.csv").read_text().splitlines())}
    assert int(rows["worst_squared_error"]["n"]) == 20
    assert float(rows["worst_squared_error"]["value"]) >= float(rows["rmse"]["value"]) ** 2
    assert run(["--config-dir", "mine/conf", "--help"]) == 0
    printed = capsys.readouterr().out
    assert "a staircase" in printed and "two networks" in printed and "the largest squared error" in printed


def test_they_go_with_what_is_built_in(here: Path) -> None:
    assert (
        run([*WORDS, "method=laplace", "model=mlp", "schedule.epochs=5", "eval.num_draws=8", "metric=[worst,joint]"])
        == 0
    )
    assert run([*WORDS, "data=gap1d", "model=waves", "method=ensemble", "schedule.epochs=5"]) == 0
    assert len(list(here.glob("outputs/runs/*/*/*/*/DONE"))) == 2


def test_an_unfit_pair_and_an_untrusted_package_are_told(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run([*WORDS, "data=mnist", "model=waves"]) == 2
    assert "model=waves reads rows" in capsys.readouterr().err
    assert run([word for word in WORDS if not word.startswith("allow=")]) == 2
    printed = capsys.readouterr().err
    assert all(f"the package {module} is not trusted" in printed for module in ("stairs", "coin"))


@pytest.mark.exhaustive
def test_the_printed_command_makes_the_cell_again(here: Path) -> None:
    """In a process of its own, which has never seen these modules, from another folder."""
    assert run([*WORDS, "schedule.epochs=3", "metric=[worst,rmse]"]) == 0
    [cell] = here.glob("outputs/runs/stairs/waves/coin/0-*")
    command = (cell / "command.txt").read_text().strip()
    other = here / "elsewhere"
    other.mkdir()
    program = f'"{Path(sys.executable).parent}/{command.split(" ", 1)[0]}" {command.split(" ", 1)[1]}'
    done = subprocess.run(["bash", "-c", program], cwd=other, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    [again] = other.glob("outputs/runs/stairs/waves/coin/0-*")
    assert again.name == cell.name
    assert (again / "metrics.csv").read_text() == (cell / "metrics.csv").read_text()


SECTION = """
from bnn_runner.report.grid import Grid, Line
from bnn_runner.report.section import Section


def _tables(request):
    lines = tuple(Line((row.name, str(row.n)), (), row.n) for row in request.table.rows)
    return [Grid("finished runs", ("row", "n"), 1, (), lines)]


def _figure(request, path):
    path.write_bytes(b"a picture")
    return path


SECTION = Section("--tally", "also how many runs each row has", _tables, _figure, example=("--tally", "counts"))
"""


@pytest.mark.exhaustive
def test_a_report_section_is_one_file_and_its_name_in_the_table(empty: Path) -> None:
    """In a copy of the source: flag, help, table and figure of the new section, with two files touched."""
    copy = empty / "copy"
    for name in ("bnn_runner", "conf", "pyproject.toml"):
        source = ROOT / name
        ignored = shutil.ignore_patterns("__pycache__")
        if source.is_dir():
            shutil.copytree(source, copy / name, ignore=ignored)
        else:
            shutil.copy(source, copy / name)
    before = {path: path.read_bytes() for path in copy.rglob("*") if path.is_file()}
    report = copy / "bnn_runner" / "report"
    (report / "tally.py").write_text(SECTION.lstrip(), encoding="utf-8")
    table = report / "sections.py"
    text = table.read_text(encoding="utf-8")
    named = text.replace("    structures,\n", "    structures,\n    tally,\n")
    named = named.replace("    ranks.SECTION,\n", "    ranks.SECTION,\n    tally.SECTION,\n")
    assert len(named) - len(text) == len("    tally,\n") + len("    tally.SECTION,\n")
    table.write_text(named, encoding="utf-8")
    touched = [p for p in copy.rglob("*") if p.is_file() and before.get(p) != p.read_bytes()]
    assert {p.name for p in touched} == {"tally.py", "sections.py"}

    assert run(["data=gap1d", "method=map", "schedule.epochs=2", "figures=false", "metric=[rmse]"]) == 0

    def report_with(*words: str) -> str:
        command = [sys.executable, "-m", "bnn_runner.cli.report", *words]
        environment = os.environ | {"PYTHONPATH": str(copy)}
        done = subprocess.run(command, cwd=empty, env=environment, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        return done.stdout

    assert "--tally" in report_with("--help")
    assert "finished runs" in report_with("--tally") and "finished runs" not in report_with()
    assert (empty / "outputs" / "results" / "comparison_tally.png").read_bytes() == b"a picture"
