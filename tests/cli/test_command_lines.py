"""Command lines as people type them, one table: what each ends with, and what its message has.

No case shows a traceback. `RUNS` reach the runner (a stub); `REFUSED` run nothing.
"""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from bnn_runner.cli.main import run
from bnn_runner.config.groups import Catalogue
from bnn_runner.config.optional_keys import without_missing_keys
from bnn_runner.config.other_programs import CHOICES, KEYS
from bnn_runner.config.overrides import UNKNOWN, as_typed, parse, render
from bnn_runner.config.recommend import expand
from bnn_runner.config.validate import check
from bnn_runner.errors import UserError, close_matches

REFUSED = {
    # other spellings, and names of other programs
    "data=MNIST": ["Did you mean mnist?"],
    "method=MAP": ["Did you mean map?"],
    "data=CIFAR-10": ["Did you mean cifar10?"],
    "model=ResNet_18": ["Did you mean resnet18?"],
    "method=deep_ensemble": ["Did you mean ensemble?"],
    "method=mfvi": ["Did you mean bbb?"],
    "method=LLLA": ["Did you mean laplace_last_layer?"],
    "logger=tb": ["Did you mean tensorboard?"],
    "Method=map": ["Did you mean method?"],
    "schedule.Epochs=3": ["Did you mean schedule.epochs?"],
    "trainer=gpu": ["device=cuda", "schedule.epochs"],
    "trainer.max_epochs=3": ["schedule.epochs"],
    "trainer.strategy=ddp": ["device=cuda"],
    "ckpt_path=last.ckpt": ["model.weights", "resumes"],
    "dataset=mnist": ["data="],
    "optimizer.weight_decay=0.1": ["prior.precision", "number of training points"],
    "data.batch_size=3": ["schedule.batch_size"],
    "n_samples=10": ["eval.num_draws"],
    # no choice
    "hyper=null": ["Choices of hyper"],
    "~method": ["Choose one"],
    "~metric=joint": ["metric=[a,b]"],
    "eval=null": ["eval must be a mapping", "eval.NAME"],
    "likelihood=null": ["likelihood must be a mapping"],
    "hydra=null": ["Remove it"],
    "hydra/launcher=null": ["Remove it"],
    "method=${oc.env:HOME}": ["not known before the run"],
    # sweeps
    "method=glob(laplace_k*)": ["several values", "-m"],
    "-m method=glob(zzz*)": ["matches no choice of method", "Choices of method: bbb"],
    "-m method=glob(laplce_kfac*)": ["matches no choice", "Did you mean laplace_kfac"],
    "-m 'method=glob(*,exclude=*)'": ["matches no choice"],
    "-m seed=range(5,5)": ["has no values"],
    "-m method=choice()": ["has no values"],
    "-m schedule.lr=interval(0,1)": ["hydra/sweeper=optuna"],
    "hydra/launcher=slurm": ["requires -m", "start here"],
    "hydra/launcher=workers hydra.launcher.n_jobs=2": ["hydra.launcher.n_jobs=2 requires -m"],
    "hydra/sweeper=optuna": ["requires -m"],
    "hydra.mode=MULTIRUN": ["Write -m"],
    "plan_only=true": ["Add -m"],
    # flags
    "--info xyz": ["--info must be one of", "plugins"],
    "--info plugin": ["Did you mean plugins?"],
    "-sc": ["install=bash"],
    "-sc install=cmd": ["install=bash"],
    "--shell-completion query=bash": ["COMP_LINE"],
    "--hydra-halp": ["Did you mean --hydra-help?"],
    # keys that only some of the choices have
    "-m method=map,laplace method.structure=kfac": ["bnn-run -m method=map,laplace 'method.structure?=kfac'"],
    "-m method=map,laplace method.structure=kfac method.rank=3": [
        "method.structure and method.rank",
        "'method.structure?=kfac' 'method.rank?=3'",
    ],
    "-m data=yacht,mnist model=mlp,lenet model.hidden=[5]": ["'model.hidden?=[5]'"],
    "method=map method.structure=kfac": ["It is a key of method="],
    "method=map 'method.strcture?=kfac'": ["not a key", "structure"],
    "'method?=laplace'": ["Write method=laplace"],
    "'sed?=3'": ["Did you mean seed?"],
    "'+method.structure?=kfac'": ["takes no +"],
    "'method.structure?'": ["Write key=value"],
    "'hydra.verbose?=true'": ["a run's own keys"],
    "method=laplace 'method.rank?=many'": ["method.rank must be a whole number"],
}

RUNS = {
    "experiment=null debug=none": {"metric": "all"},
    "~experiment ~debug ~logger ~augment": {"logger": "none", "augment": "none"},
    "debug=[]": {},
    "metric=null": {"metric": []},
    "metric=none": {"metric": []},
    "metric=[]": {"metric": []},
    "~metric": {"metric": []},
    "logger=null augment=null": {"logger": "none", "augment": "none"},
    "method=laplace 'method.structure?=kfac'": {"method.structure": "kfac"},
    "method=map 'method.structure?=kfac'": {"method.structure": None},
    "'seed?=3'": {"seed": 3},
    "'metric.joint.draws?=7' metric=[accuracy]": {"metric.joint.draws": None},
}


@pytest.mark.parametrize("typed", REFUSED)
def test_refused_with_a_way_out(typed: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(shlex.split(typed)) == 2
    message = capsys.readouterr().err
    for hint in REFUSED[typed]:
        assert hint in message, message


@pytest.mark.parametrize("typed", RUNS)
def test_forms_of_one_meaning(typed: str) -> None:
    """What reaches Hydra; `test_hydra_composes_them` lets Hydra compose it."""
    found = {o.key: o.value for o in map(parse, expand(shlex.split(typed)).overrides)}
    every = Catalogue().choices("metric")
    for key, value in RUNS[typed].items():
        assert found.get(key) == (every if value == "all" else value), found
    assert not any(o.optional for o in map(parse, expand(shlex.split(typed)).overrides))


def test_hydra_composes_them(runner, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for typed in ("debug=null experiment=null logger=null", "~experiment ~debug ~metric 'method.rank?=3' method=map"):
        assert run(shlex.split(typed)) == 0
    first, second = runner.experiments
    assert first.choices["logger"] == "none" and "debug" not in first.choices and len(first.metrics) > 5
    assert not second.metrics and [n for n in second.run.notes if n.startswith("method.rank?=3 has no effect")]


FLAGS = {
    "--hydra-help method=map": (["--hydra-help"], "--cfg"),
    "--info method=map": (["--info", "all"], "Sweeper"),
    "--info=plugins": (["--info", "plugins"], "Sweeper"),
    "-sc query=bash": (["--shell-completion", "query=bash"], "method=laplace_kfac"),
    "--shell-completion=install=zsh": (["--shell-completion", "install=zsh"], "complete"),
}


@pytest.mark.parametrize("typed", FLAGS)
def test_flags_for_hydra(typed: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Planted bug: an override right after --info is read as its topic, one after --hydra-help as a key of Hydra."""
    passed: list[str] = []
    monkeypatch.setenv("COMP_LINE", "bnn-run method=laplace_k")
    monkeypatch.setattr("bnn_runner.cli.launch._through_hydra", lambda arguments, task: passed.extend(arguments))
    assert run(shlex.split(typed)) == 0
    assert passed[: len(FLAGS[typed][0])] == FLAGS[typed][0]


@pytest.mark.exhaustive
@pytest.mark.parametrize("typed", FLAGS)
def test_hydra_answers(typed: str, tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "bnn_runner.cli.main", *shlex.split(typed)],
        capture_output=True,
        text=True,
        env={"PYTHONPATH": str(Path(__file__).parents[2]), "COMP_LINE": "bnn-run method=laplace_k", "COMP_POINT": "24"},
        cwd=tmp_path,
    )
    assert done.returncode == 0 and FLAGS[typed][1] in done.stdout and "Traceback" not in done.stderr


# ------------------------------------------------------------------------------ keys where they exist


def jobs(typed: str) -> list[list[str]]:
    """The jobs of a sweep: what Hydra's sweeper makes of the overrides, with optional keys settled."""
    import itertools

    checked = check(shlex.split(typed), multirun=True)
    options = [[o.single(v) for v in o.values] if o.sweep else [o] for o in checked.overrides]
    points = [[render(o) for o in combination] for combination in itertools.product(*options)]
    settled = [without_missing_keys(checked.catalogue, point) for point in points]
    return [list(point) for point in dict.fromkeys(map(tuple, settled))]


@pytest.mark.parametrize(
    ("typed", "expected"),
    [
        ("method=map,laplace 'method.structure?=kfac'", ["method=map", "method=laplace method.structure=kfac"]),
        (
            "method=map,laplace 'method.structure?=kfac,diag'",
            ["method=map", "method=laplace method.structure=kfac", "method=laplace method.structure=diag"],
        ),
        ("method=swag,laplace 'method.rank?=3'", ["method=swag method.rank=3", "method=laplace method.rank=3"]),
        ("method=map,ensemble 'method.rank?=3'", ["method=map", "method=ensemble"]),
        ("'method=glob(laplace_k*)'", ["method=laplace_kfac", "method=laplace_kfac_mc"]),
        ("'method=glob([map,swag*],exclude=*diag)'", ["method=map", "method=swag"]),
    ],
)
def test_jobs_of_a_sweep(typed: str, expected: list[str]) -> None:
    """Planted bugs: the key set everywhere or nowhere; a job twice, once for every value that it ignores."""
    assert [" ".join(job) for job in jobs(typed)] == expected


def test_advice_for_keys_of_some_choices_can_be_pasted(capsys: pytest.CaptureFixture[str]) -> None:
    typed = "-m method=map,laplace method.structure=kfac 'data_dir=\"/a,b\"' seed=0,1"
    assert run(shlex.split(typed)) == 2
    command = re.search(r"bnn-run (-m .*)", capsys.readouterr().err)
    assert command is not None
    checked = check([w for w in shlex.split(command[1]) if w != "-m"], multirun=True)
    assert checked.jobs == 4 and checked.tree["data_dir"] == "/a,b"


def test_an_optional_key_survives_hydra_and_is_shown_as_typed() -> None:
    from hydra.core.override_parser.overrides_parser import OverridesParser

    override = parse("method.structure?=kfac")
    assert override.optional and override.key == "method.structure" and override.text == "method.structure?=kfac"
    rendered = render(override)
    assert OverridesParser.create().parse_override(rendered).value() == "kfac"
    again = parse(rendered)
    assert again.optional and again.key == override.key and again.text == override.text
    assert as_typed(rendered) == "method.structure?=kfac" and as_typed("+a=1") == "a=1" and as_typed("a=$b=") == "a=$b="


# --------------------------------------------------------------------------------------- names


def test_pointers_lead_to_keys_and_choices_that_exist() -> None:
    """Planted bug: a pointer to a key that was renamed."""
    catalogue = Catalogue()
    for key, advice in KEYS.items():
        assert key not in catalogue.base, f"{key} is a setting"
        for group, name in re.findall(r"\b(model|schedule|prior|method|eval)\.(\w+)=", advice):
            trees = [catalogue.base.get("eval", {})] if group == "eval" else [catalogue.shared.get(group, {})]
            trees += [catalogue.load(group, c) for c in catalogue.choices(group)] if group != "eval" else []
            assert any(name in tree for tree in trees), f"{key}: {group}.{name}"
        for name in re.findall(r"(?<![\w./])(\w+)=", advice):
            known = {*catalogue.base, *catalogue.groups, "experiment", "debug", "hydra", "FILE"}
            assert name in known, f"{key}: {name}"
    for group, names in CHOICES.items():
        assert set(names.values()) <= set(catalogue.groups[group]), group
        assert not set(names) & set(catalogue.groups[group]), f"a choice of {group} is another one elsewhere"


def test_close_names() -> None:
    assert close_matches("MNIST", ["mnist", "kmnist", "mnist_rotated"]) == ["mnist"]
    assert close_matches("laplace-kfac", ["laplace", "laplace_kfac"]) == ["laplace_kfac"]
    assert close_matches("xyz", ["mnist"]) == []


def test_a_sweep_over_values_that_are_not_known_yet_is_refused_or_left_to_hydra() -> None:
    assert parse("seed=range(0,1,0.5)").values == (UNKNOWN, UNKNOWN)
    with pytest.raises(UserError, match="interval"):
        check(["prior.precision=interval(1,2)"], multirun=True)
    check(["prior.precision=interval(1,2)", "hydra/sweeper=optuna"], multirun=True)


def test_cases_are_counted() -> None:
    assert len(REFUSED) + len(RUNS) >= 60
