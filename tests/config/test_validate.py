"""Stage one: every mistake at once, with what to type instead, before anything heavy is imported."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from bnn_runner.config.schema import field_types
from bnn_runner.config.settings import NoiseSettings, Settings
from bnn_runner.config.validate import check
from bnn_runner.errors import UserError


def mistakes(overrides: list[str], folder: Path | None = None, multirun: bool = False) -> list[str]:
    with pytest.raises(UserError) as caught:
        check(overrides, [folder] if folder else [], multirun)
    return list(caught.value.problems)


def test_all_mistakes_are_listed_at_once() -> None:
    found = mistakes(
        ["data=mnst", "methd=map", "schedule.epohcs=3", "schedule.lr=fast", "device=gpu", "seed=x", "laplace"]
    )
    assert len(found) == 7
    together = "\n".join(found)
    for hint in ("Did you mean mnist", "Did you mean method", "schedule.epochs", "a number", "cuda", "method=laplace"):
        assert hint in together


@pytest.mark.parametrize(
    ("typed", "hints"),
    [
        ("method=laplce", ["Did you mean", "laplace", "Choices of method:", "ensemble"]),
        ("metric=[marginal,dee]", ["bnn-report --equivalents", "method.size=2,3,5"]),
        ("model.hiden=[3]", ["model=mlp", "Did you mean model.hidden"]),
        ("lr=0.1", ["schedule.lr"]),
        ("model.hidden=3", ["a list", "model.hidden=[3]"]),
        ("schedule.epochs=ten", ["whole number"]),
        ("schedule.nesterov=3", ["true or false"]),
        ("schedule.lr=true", ["a number"]),
        ("model.activation=3", ["text"]),
        ("seed=1.5", ["whole number"]),
        ("seed=-1", ["0 or more"]),
        ("eval.num_draws=0", ["at least 1"]),
        ("eval.draws=3", ["eval.num_draws"]),
        ("figures=maybe", ["true or false"]),
        ("likelihood.noise=learnd", ["Did you mean learned"]),
        ("device=gpu", ["auto, cpu, cuda, mps"]),
        ("time_limit=soon", ["a number", "null"]),
        ("laplace", ["method=laplace"]),
        ("mnist", ["data=mnist"]),
        ("seed", ["seed=..."]),
        ("whatever", ["key=value"]),
        ("seed=0,1", ["-m"]),
        ("metric=joint,ece", ["metric=[joint,ece]"]),
        ("model.hidden=3,4", ["-m", "model.hidden=[3,4]"]),
        ("data_dir=a,b", ["-m", "'data_dir=\"a,b\"'"]),
        ("data_dir=/x=1", ["'data_dir=\"/x=1\"'"]),
        ("data=null", ["data=null"]),
        ("data=[yacht,mnist]", ["one name"]),
        ("~data", ["Choose one"]),
        ("~seed", ["another value"]),
        ("+schedule.lr=1", ["Remove the '+'"]),
        ("metric.joint.blub=1", ["metric.joint.blub"]),
        ("hydra.searchpath=[x]", ["--config-dir"]),
        ("schedule.epochs=[1", ["']' is missing"]),
    ],
)
def test_one_mistake_is_told_with_a_way_out(typed: str, hints: list[str]) -> None:
    found = mistakes([typed])
    assert len(found) == 1, found
    for hint in hints:
        assert hint in found[0], found[0]


@pytest.mark.parametrize(
    "typed",
    [
        [],
        ["data=yacht", "method=map", "schedule.epochs=3", "schedule.lr=1"],
        ["time_limit=3"],
        ["time_limit=null"],
        ["threads=2", "eval.max_ood=null"],
        ["model=lenet", "data=mnist"],
        ["metric=[joint,ece]", "metric.ece.bins=5"],
        ["likelihood={noise:fixed,sigma:0.1}"],
        ["experiment=null"],
        ["hydra.verbose=true", "hydra/job_logging=disabled"],
        ["data_dir=${oc.env:HOME}/data"],
        ["data_dir='/a=1,b'"],
        ["~experiment"],
        ["+experiment=null"],
    ],
)
def test_right_command_lines_pass(typed: list[str]) -> None:
    assert check(typed).jobs == 1


def test_a_key_of_another_choice_is_named(toys: Path) -> None:
    (found,) = mistakes(["data=toy", "model.norm=batch"], toys)
    assert "model=toynet" in found and "mlp" in found


def test_a_swept_key_must_be_there_at_every_point(toys: Path) -> None:
    (found,) = mistakes(["data=toy", "model=mlp,toynet", "model.square=true"], toys, multirun=True)
    assert "model=mlp" in found and "toynet" in found
    check(["data=toy", "model=mlp,toynet", "model.hidden=[1],[2]"], [toys], multirun=True)
    (found,) = mistakes(["seed=0,1,x"], multirun=True)
    assert "got x" in found


def test_jobs_are_counted(toys: Path) -> None:
    assert check(["method=map,laplace", "seed=range(0,5)"], multirun=True).jobs == 10
    assert check(["experiment=grid"], [toys], multirun=True).jobs == 4
    assert check(["experiment=grid", "seed=7"], [toys], multirun=True).jobs == 2


def test_an_experiment_that_sweeps_needs_multirun(toys: Path) -> None:
    (found,) = mistakes(["experiment=grid"], toys)
    assert "-m" in found
    (found,) = mistakes(["experiment=grid,toys"], toys, multirun=True)
    assert "separately" in found


def test_a_size_changes_what_is_swept_and_must_be_there(toys: Path) -> None:
    """Planted bug: the paper's seeds are forgotten, and size=paper of an experiment without it runs the small one."""
    assert check(["experiment=sized"], [toys], multirun=True).jobs == 4
    assert check(["experiment=sized", "size=paper"], [toys], multirun=True).jobs == 6
    assert check(["experiment=sized"], [toys], multirun=True).jobs == 4, "asking for a size leaves no trace"
    for typed in (["size=paper"], ["experiment=grid", "size=paper"], ["experiment=sized", "size=small,paper"]):
        (found,) = mistakes(typed, toys, multirun=True)
        assert "size" in found and ("Remove size" in found or "one value" in found)
    (found,) = mistakes(["experiment=sized", "size=medium"], toys, multirun=True)
    assert "which has: small, paper" in found
    (found,) = mistakes(["experiment=sized", "size=huge"], toys, multirun=True)
    assert "got huge" in found and "paper" in found


def test_a_metric_without_its_package_is_told(toys: Path) -> None:
    (toys / "metric" / "count.yaml").write_text("# Count\n# @package metric.count\n_target_: toykit.Count\n")
    (found,) = mistakes([], toys)
    assert "# @package metric.count" in found and "count.yaml" in found


def test_broken_yaml_is_told_with_its_file(toys: Path) -> None:
    (toys / "data" / "toy.yaml").write_text("a: [1\n")
    found = mistakes(["data=toy"], toys)
    assert any("toy.yaml" in problem for problem in found)


def test_settings_and_config_yaml_have_the_same_keys() -> None:
    base = check([]).tree
    own = set(field_types(Settings))
    assert set(base) == own | {"likelihood"}
    assert set(base["likelihood"]) == set(field_types(NoiseSettings))


def test_nothing_heavy_is_imported() -> None:
    code = (
        "import sys\nfrom bnn_runner.cli.main import run\n"
        "codes = run(['data=mnst', 'seed=x']), run(['--help']), run(['--version'])\n"
        "heavy = {'torch', 'hydra', 'omegaconf', 'numpy', 'pandas', 'matplotlib', 'torchvision', 'sklearn'}\n"
        "print('FOUND', codes, sorted(heavy & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "FOUND (2, 0, 0) []" in done.stdout
