"""A folder of choices from outside the package, and a stub in place of the runner."""

from __future__ import annotations

import signal
import sys
import types
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

import bnn_runner
from bnn_runner.sweeps import job as cli_job

TOYKIT = """
from dataclasses import dataclass
from typing import ClassVar, Literal
from bnn_runner.tasks import TaskSpec
from bnn_runner.errors import UserError

@dataclass(frozen=True)
class Data:
    size: int = 10
    shift: float = 0.5
    val_fraction: float = 0.1
    def spec(self):
        return TaskSpec("toy", "regression", (1,), 1, self.val_fraction)
    def load(self, data_dir, seed):
        raise NotImplementedError

@dataclass(frozen=True)
class Net:
    hidden: tuple[int, ...]
    activation: Literal["tanh", "relu"] = "tanh"
    square: bool = False
    def problems(self, spec):
        return [f"model=toynet is square, and {spec.name} is not. Set model.square=false."] if self.square else []
    def build(self, spec):
        raise NotImplementedError

@dataclass(frozen=True)
class Fit:
    uses_hyper: ClassVar[bool] = True
    finite: ClassVar[bool] = False
    predictive: ClassVar[str] = "draws"
    steps: int = 3
    def __post_init__(self):
        if self.steps < 1:
            raise UserError(f"method.steps={self.steps} fits nothing. It must be 1 or more.")
    def problems(self, spec, hyper):
        return []
    def needs(self):
        return []
    def fit(self, task, networks, context):
        raise NotImplementedError

@dataclass(frozen=True)
class Count:
    bins: int = 4
    def __call__(self, evaluation, seed):
        return []

def not_a_class():
    raise AssertionError("a configuration must not be able to call functions")
"""

CHOICES = {
    "data/toy.yaml": """
        # A toy
        _target_: toykit.Data
        size: 10
        shift: 0.5
        val_fraction: 0.1
        recommended:
          model: toynet
          schedule: sgd
          prior: layerwise
          hyper: fixed
          values:
            model.hidden: [7]
            schedule.epochs: 11
            eval.num_draws: 12
            method.steps: 5
          for_model:
            mlp:
              schedule: adam
              values: {model.hidden: [9], schedule.epochs: 13}
        """,
    "data/bare.yaml": """
        # A toy that recommends nothing
        _target_: toykit.Data
        size: 10
        shift: 0.5
        val_fraction: 0.1
        """,
    "model/toynet.yaml": """
        # A toy network
        _target_: toykit.Net
        hidden: [3]
        activation: tanh
        square: false
        """,
    "method/toyfit.yaml": """
        # A toy method
        _target_: toykit.Fit
        steps: 3
        """,
    "metric/count.yaml": """
        # @package metric.count
        # A toy metric
        _target_: toykit.Count
        bins: 4
        """,
    "experiment/toys.yaml": """
        # @package _global_
        # A toy experiment
        defaults:
          - override /data: toy
          - override /method: toyfit
        schedule:
          epochs: 21
        seed: 5
        """,
    "experiment/sized.yaml": """
        # @package _global_
        # A toy of two sizes, with settings for one method
        defaults:
          - override /data: toy
          - override /method: toyfit
        schedule:
          epochs: 21
        hydra:
          sweeper:
            params:
              seed: 1,2
              method: map,toyfit
        where:
          method=toyfit,other: {method.steps: 8}
          size=paper: {model: mlp, seed: "1,2,3", schedule.epochs: 90}
          size=paper model=mlp method=toyfit: {method.steps: 9}
          data.size=4: {data.shift: 0.25}
        """,
    "experiment/grid.yaml": """
        # @package _global_
        # A toy sweep
        defaults:
          - override /data: toy
          - override /method: toyfit
        hydra:
          sweeper:
            params:
              seed: 1,2
              schedule.lr: 0.1,0.2
        """,
}


@pytest.fixture
def toys(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A --config-dir with toykit.py next to it; the current folder is an empty one."""
    import textwrap

    folder = tmp_path / "mine" / "conf"
    for name, text in CHOICES.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(textwrap.dedent(text).lstrip())
    (folder.parent / "toykit.py").write_text(TOYKIT)
    here = tmp_path / "here"
    here.mkdir()
    monkeypatch.chdir(here)
    path_before = list(sys.path)
    yield folder
    sys.path[:] = path_before
    sys.modules.pop("toykit", None)


@dataclass
class StubOutcome:
    status: str
    message: str = ""
    cells: tuple[Path, ...] = ()


@dataclass
class StubRunner:
    """Stands in for bnn_runner.runner: records experiments, answers by `answer`."""

    answer: Callable[[object], StubOutcome] = lambda experiment: StubOutcome("done")
    experiments: list = field(default_factory=list)
    overrides: list = field(default_factory=list)

    def run(self, experiment: object) -> StubOutcome:
        self.experiments.append(experiment)
        self.overrides.append(experiment.run.overrides)  # type: ignore[attr-defined]
        return self.answer(experiment)


@pytest.fixture
def runner(monkeypatch: pytest.MonkeyPatch) -> StubRunner:
    stub = StubRunner()
    module = types.ModuleType("bnn_runner.runner")
    module.run_together = lambda experiments, **_: [stub.run(e) for e in experiments]  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "bnn_runner.runner", module)

    def in_this_process(members, spec):
        outcomes = cli_job.run_members(members, spec.config_dir, spec.start)
        return outcomes, signal.SIGINT if outcomes[0]["status"] == "interrupted" else 0

    monkeypatch.setattr(cli_job, "run_members_in_child", in_this_process)
    monkeypatch.setattr(bnn_runner, "runner", module, raising=False)
    return stub
