"""The public contract checks: built-in choices pass, and each planted bug is found with a sentence that names it."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor, nn

from bnn_runner.base import Choice, Draws, FitReport, Likelihood, TrainingSpec
from bnn_runner.data.gap1d import Gap1D
from bnn_runner.methods.map import MAP
from bnn_runner.models.likelihoods import Categorical
from bnn_runner.models.mlp import MLP
from bnn_runner.scoring import Score
from bnn_runner.tasks import TaskSpec
from bnn_runner.testing import check_choice, check_data, check_method, check_metric, check_model, check_rule
from tests.choices import CATALOGUE, CONF, choices, make

GROUPS = [g for g in CATALOGUE.groups if g not in ("experiment", "debug")]
FILES = [(g, c) for g in GROUPS for c in choices(g) if (g, c) != ("model", "module")]


def message(check: Callable[[], Any]) -> str:
    """What the check says; it must fail."""
    with pytest.raises(AssertionError) as caught:
        check()
    return str(caught.value)


@pytest.mark.parametrize(("group", "choice"), FILES)
def test_every_file_of_conf_describes_its_class(group: str, choice: str) -> None:
    """Planted bugs: a key that the class lacks; a file without a help line; a class that is not frozen."""
    assert type(check_choice(CONF, group, choice)).__name__ == CATALOGUE.load(group, choice)["_target_"].split(".")[-1]


@pytest.mark.parametrize("name", choices("hyper"))
def test_every_rule_keeps_its_contract(name: str) -> None:
    check_rule(make("hyper", name))


@pytest.mark.exhaustive
def test_the_package_needs_no_pytest() -> None:
    """Planted bug: an import of pytest, which a person who runs experiments has not installed."""
    code = "import sys; import bnn_runner.testing; sys.exit('pytest' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


# ------------------------------------------------------------------------------------- methods


@dataclass(frozen=True)
class Noisy:
    """Draws of MAP with Gaussian noise on the outputs, as wrong as `bug` has it."""

    bug: str
    network: Any
    first: int = 0
    size: int = 5
    seed: int = 0

    @property
    def log_weights(self) -> Tensor:
        return torch.zeros(self.size, dtype=torch.float64)

    @property
    def floats_per_draw(self) -> int:
        return 1

    @property
    def likelihood(self) -> Likelihood:
        found: Likelihood = self.network.likelihood
        return found

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, part: slice) -> Draws:
        start, stop, _ = part.indices(self.size)
        return replace(self, first=0 if self.bug == "slice" else self.first + start, size=stop - start)

    def __call__(self, x: Tensor) -> Tensor:
        outputs = self.network(x)
        if self.bug == "global":
            torch.rand(1)
        if self.bug == "batch":
            outputs = outputs + x.reshape(len(x), -1).sum(1).mean()
        made = []
        for s in range(self.first, self.first + self.size):
            g = torch.Generator().manual_seed(s if self.bug == "seed" else 1000 * self.seed + s)
            if self.bug == "fresh":
                made.append(outputs + torch.randn(outputs.shape, dtype=outputs.dtype))
            else:
                made.append(outputs + torch.randn(1, outputs.shape[1], dtype=outputs.dtype, generator=g))
        return torch.stack(made)


@dataclass(frozen=True)
class NoisyPosterior:
    bug: str
    network: Any
    treatment: Mapping[str, str]
    report: FitReport
    finite: bool = False

    @property
    def likelihood(self) -> Likelihood:
        return self.network.likelihood or Categorical()

    def draws(self, num_draws: int, seed: int) -> Draws:
        return Noisy(self.bug, self.network, size=num_draws, seed=seed)


@dataclass(frozen=True)
class NoisyMethod:
    """MAP with noise, right for bug=''."""

    bug: str = ""
    uses_hyper: ClassVar[bool] = False
    finite: ClassVar[bool] = False
    predictive: ClassVar[Any] = "draws"

    def problems(self, spec: TaskSpec, hyper: Any) -> list[str]:
        return ["no"] if self.bug == "sentence" else []

    def needs(self) -> Sequence[TrainingSpec]:
        return [TrainingSpec(0)]

    def fit(self, task: Any, networks: Any, context: Any) -> Any:
        if self.bug == "mode":
            networks[0].module.eval()
        if self.bug == "dtype":
            torch.set_default_dtype(torch.float64)
        treated = dict.fromkeys(list(networks[0].parameters)[self.bug == "treatment" :], "noise")
        report = FitReport({"value": torch.zeros(1) if self.bug == "report" else 1.0})
        return NoisyPosterior(self.bug, networks[0], treated, report, self.bug == "finite")


def test_a_right_method_passes() -> None:
    check_method(MAP())
    check_method(NoisyMethod(), allow=["tests"])


@pytest.mark.parametrize(
    ("bug", "words"),
    [
        ("fresh", "A draw must be one function of x"),
        ("batch", "A draw must be one function of x"),
        ("slice", "must be draws"),
        ("seed", "Every draw must change with the seed"),
        ("finite", "`finite` of method and posterior must agree"),
        ("sentence", "must return whole sentences"),
        ("treatment", "treatment must name every parameter tensor"),
        ("report", "must be a plain value for JSON"),
        ("mode", "fit must leave the training flags of network 0"),
        ("dtype", "an earlier fit has changed them"),
        ("global", "draws(x) must leave the global random state"),
    ],
)
def test_a_wrong_method_is_found(bug: str, words: str) -> None:
    try:
        found = message(lambda: check_method(NoisyMethod(bug), models=[MLP(hidden=(4,))], saves=False))
    finally:
        torch.set_default_dtype(torch.float32)
    assert words in found, found


# -------------------------------------------------------------------------------------- models


class Net(nn.Module):
    """A perceptron, as wrong as `bug` has it."""

    def __init__(self, inputs: int, outputs: int, bug: str) -> None:
        super().__init__()
        own = torch.Generator().manual_seed(0)
        self.first, self.last = nn.Linear(inputs, 4), nn.Linear(4, outputs)
        self.bug = bug
        if bug == "unused":
            self.spare = nn.Parameter(torch.ones(2))
        if bug == "seed":
            for p in self.parameters():
                p.data = torch.randn(p.shape, generator=own)
        self.kept = [self.last.weight.detach().clone()] if bug == "cache" else []

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.first(x))
        if self.bug == "batch":
            h = h - h.mean(0)
        if self.bug == "random":
            h = h + 0.1 * torch.randn_like(h)
        if self.bug == "cache":
            return h @ self.kept[0].to(h).mT
        outputs: Tensor = self.last(h)
        return outputs.unsqueeze(0) if self.bug == "shape" else outputs


@dataclass(frozen=True)
class NetModel:
    bug: str = ""

    def problems(self, spec: TaskSpec) -> list[str]:
        fits = len(spec.input_shape) == 1 and not spec.vocabulary
        return [] if fits else ["images" if self.bug == "sentence" else "This network needs rows of a table."]

    def build(self, spec: TaskSpec) -> nn.Module:
        return Net(spec.input_shape[0], spec.num_outputs, self.bug)


def test_a_right_model_passes() -> None:
    check_model(NetModel())


@pytest.mark.parametrize(
    ("bug", "words"),
    [
        ("shape", "Outputs must be [B, K]"),
        ("batch", "must not depend on the other points"),
        ("random", "must not depend on the other points"),
        ("cache", "Every parameter must enter the output"),
        ("unused", "Every parameter must enter the output; these do not: spare"),
        ("seed", "Initial weights must come from torch's global generator"),
        ("sentence", "must return whole sentences"),
    ],
)
def test_a_wrong_model_is_found(bug: str, words: str) -> None:
    found = message(lambda: check_model(NetModel(bug)))
    assert words in found, found


# ---------------------------------------------------------------------------------------- data


@dataclass(frozen=True)
class Wrong:
    """The built-in gap1d, as wrong as `bug` has it."""

    bug: str
    val_fraction: float = 0.1

    @property
    def inner(self) -> Gap1D:
        return Gap1D(num_train=50, num_test=20, noise=0.1, val_fraction=0.1, train_size=None, test_size=None)

    def spec(self) -> TaskSpec:
        spec = self.inner.spec()
        return replace(spec, num_outputs=2) if self.bug == "spec" else spec

    def load(self, data_dir: Path, seed: int) -> Any:
        task = self.inner.load(data_dir, 0 if self.bug == "seed" else seed)
        train = task.train
        if self.bug == "leak":
            return replace(task, test=replace(task.test, ids=train.ids[: len(task.test)]))
        if self.bug == "global":
            torch.rand(1)
        if self.bug == "mixed":
            return replace(task, test=replace(task.test, prepare=lambda x: x - x.mean(0)))
        if self.bug == "scale":
            assert train.targets is not None
            return replace(task, train=replace(train, targets=3 * train.targets))
        if self.bug == "fingerprint":
            return replace(task, fingerprint=str(torch.Generator().seed()))
        return task


@pytest.mark.parametrize(
    ("bug", "words"),
    [
        ("spec", "must have the specification spec() states"),
        ("leak", "No point may be in two of train, val and test"),
        ("mixed", "A point must be the same in every batch"),
        ("scale", "must be standardised on the training part"),
        ("seed", "another training part for another seed"),
        ("fingerprint", "must give the same fingerprint for the same seed"),
        ("global", "load must leave the global random state"),
    ],
)
def test_a_wrong_data_set_is_found(bug: str, words: str) -> None:
    check_data(Wrong(""))
    found = message(lambda: check_data(Wrong(bug)))
    assert words in found, found


# -------------------------------------------------------------------------- metrics and rules


@dataclass(frozen=True)
class Odd:
    bug: str = ""

    def __call__(self, evaluation: Any, seed: int) -> list[Any]:
        value = float(evaluation.test.loglik.mean())
        if self.bug == "random":
            value += float(torch.rand(1))
        if self.bug == "changes":
            evaluation.test.loglik.add_(1.0)
        wrong: dict[str, dict[str, Any]] = {
            "tensor": {"value": evaluation.test.loglik.mean()},
            "status": {"status": "unknown"},
            "reason": {"value": float("nan"), "status": "n/a"},
        }
        return [] if self.bug == "nothing" else [Score("odd", **({"value": value} | wrong.get(self.bug, {})))]


@pytest.mark.parametrize(
    ("bug", "words"),
    [
        ("random", "must be a pure function"),
        ("changes", "it has changed the evaluation"),
        ("tensor", "value must be a float"),
        ("status", "status must be one of"),
        ("reason", "its reason in `note`"),
        ("nothing", "must have a score for one kind of task"),
    ],
)
def test_a_wrong_metric_is_found(bug: str, words: str) -> None:
    check_metric(Odd())
    found = message(lambda: check_metric(Odd(bug)))
    assert words in found, found


@dataclass(frozen=True)
class Rule:
    bug: str = ""
    needs_validation: ClassVar[bool] = False

    def choose(self, problem: Any) -> Choice:
        found = torch.rand(2) if self.bug == "random" else 2 * problem.start
        found = -found if self.bug == "negative" else found[:1] if self.bug == "shape" else found
        status: Any = "done" if self.bug == "status" else "fixed"
        return Choice(found, status)


@pytest.mark.parametrize(
    ("bug", "words"),
    [
        ("random", "choose must leave the global random state"),
        ("negative", "must choose positive, finite precisions"),
        ("shape", "one precision per group"),
        ("status", "status must be one of fixed"),
    ],
)
def test_a_wrong_rule_is_found(bug: str, words: str) -> None:
    check_rule(Rule())
    found = message(lambda: check_rule(Rule(bug)))
    assert words in found, found


def test_a_wrong_file_is_found(tmp_path: Path) -> None:
    """Planted bugs: no help line; a key too many; a recommended key of nobody; a missing package header."""
    files = {
        "method/silent.yaml": "_target_: bnn_runner.methods.map.MAP\n",
        "method/more.yaml": "# one key too many\n_target_: bnn_runner.methods.map.MAP\nsize: 3\n",
        "data/wish.yaml": "# no model has wings\ndefaults: [gap1d, _self_]\nrecommended: {values: {model.wings: 2}}\n",
        "metric/lost.yaml": "# a metric without its header\n_target_: bnn_runner.metrics.rmse.RMSE\n",
    }
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    assert "must begin with a comment" in message(lambda: check_choice(tmp_path, "method", "silent"))
    assert "unknown: ['size']" in message(lambda: check_choice(tmp_path, "method", "more"))
    assert "got model.wings, which is not a key" in message(lambda: check_choice(tmp_path, "data", "wish"))
    assert "@package metric.lost" in message(lambda: check_choice(tmp_path, "metric", "lost"))
    assert "is missing in" in message(lambda: check_choice(tmp_path, "method", "absent"))
