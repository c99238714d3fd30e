"""Stage two: composed, built through the allow-list, every problem of every component at once."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import pytest
from hydra import initialize_config_dir
from hydra.core.global_hydra import GlobalHydra

from bnn_runner.config.groups import packaged_conf
from bnn_runner.errors import UserError
from bnn_runner.experiment import build, compose, load_experiment

TOY = ["data=toy", "method=toyfit", "metric=[count]", "allow=[toykit]"]


@dataclass(frozen=True)
class Part:
    count: int
    rate: float = 0.1
    name: Literal["one", "two"] = "one"
    widths: tuple[int, ...] = ()
    limit: int | None = None
    flag: bool = False

    def __post_init__(self) -> None:
        if self.count < 0:
            raise UserError(f"part.count={self.count} is negative. It must be 0 or more.")


@dataclass(frozen=True)
class Holder:
    part: Part


@pytest.fixture(autouse=True)
def parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "partkit", sys.modules[__name__])


def made(**fields: object) -> Part:
    return build({"_target_": "partkit.Part", **fields}, ["partkit"], "part")


def told(**fields: object) -> list[str]:
    with pytest.raises(UserError) as caught:
        made(**fields)
    return list(caught.value.problems)


def test_fields_are_converted() -> None:
    part = made(count=1, rate=2, widths=[3, 4], limit=None)
    assert part == Part(1, 2.0, "one", (3, 4), None)
    assert isinstance(part.rate, float) and isinstance(part.widths, tuple)


def test_every_problem_of_a_part() -> None:
    found = told(cout=1, rate="fast", name="tow", widths=[1, 2.5], limit=1.5, flag=1)
    assert len(found) == 7
    together = "\n".join(found)
    for hint in (
        "Did you mean part.count",
        "part.count is missing",
        "Did you mean two",
        "a number",
        "true or false",
        "null",
    ):
        assert hint in together


@pytest.mark.parametrize("value", [True, "1", 1.5, None, [1]])
def test_whole_numbers_are_strict(value: object) -> None:
    assert "whole number" in told(count=value)[0]


def test_ranges_are_told_by_the_class() -> None:
    assert told(count=-1) == ["part.count=-1 is negative. It must be 0 or more."]


def test_nested_parts() -> None:
    node = {"_target_": "partkit.Holder", "part": {"_target_": "partkit.Part", "count": 2}}
    assert build(node, ["partkit"]).part.count == 2
    with pytest.raises(UserError, match=r"holder.part.count"):
        build({"_target_": "partkit.Holder", "part": {"_target_": "partkit.Part", "count": "x"}}, ["partkit"], "holder")


def test_untrusted_packages_are_refused_without_importing_them() -> None:
    with pytest.raises(UserError, match=r"allow=\[antigravity\]"):
        build({"_target_": "antigravity.Fly"}, [], "method")
    assert "antigravity" not in sys.modules


def test_only_dataclasses_are_built() -> None:
    with pytest.raises(UserError, match="must be a dataclass"):
        build({"_target_": "os.system", "command": "true"}, ["os"])
    with pytest.raises(UserError, match="must be a dataclass"):
        build({"_target_": "bnn_runner.config.validate.check"})
    with pytest.raises(UserError, match=r"has no Scedule.* Did you mean Schedule"):
        build({"_target_": "bnn_runner.training.schedules.Scedule"})
    with pytest.raises(UserError, match="could not import"):
        build({"_target_": "bnn_runner.nowhere.Class"})
    with pytest.raises(UserError, match="_target_"):
        build({})


def test_compose_outside_and_inside_of_a_running_hydra(toys: Path) -> None:
    outside = compose(["data=toy", "method=toyfit", "seed=3"], toys)
    assert outside["seed"] == 3 and outside["data"]["size"] == 10 and "hydra" not in outside
    with initialize_config_dir(config_dir=str(packaged_conf()), version_base="1.3"):
        running = GlobalHydra.instance().hydra
        assert compose(["data=toy", "method=toyfit", "seed=3"], toys) == outside
        assert GlobalHydra.instance().hydra is running
    assert not GlobalHydra.instance().is_initialized()


def test_experiment_from_outside_the_package(toys: Path) -> None:
    experiment = load_experiment([*TOY, "schedule.epochs=4", "output_dir=out", "cache_dir=~/cache"], toys)
    assert type(experiment.data).__module__ == "toykit"
    assert experiment.model.hidden == (7,) and experiment.method.steps == 5  # type: ignore[attr-defined]
    assert experiment.schedule.epochs == 4
    assert list(experiment.metrics) == ["count"]
    assert experiment.choices["model"] == "toynet" and experiment.choices["metric"] == ["count"]
    assert "recommended" not in experiment.config["data"]
    assert experiment.config["model"]["hidden"] == [7]
    assert experiment.settings.output_dir == Path.cwd() / "out"
    assert experiment.settings.cache_dir == Path("~/cache").expanduser()
    assert experiment.settings.eval.num_draws == 12
    again = load_experiment(experiment.run.overrides, toys)
    assert again.config == experiment.config, "the expanded overrides must reproduce the run"


def test_experiment_file_values_reach_the_run(toys: Path) -> None:
    experiment = load_experiment(["experiment=toys", "metric=[count]", "allow=[toykit]"], toys)
    assert experiment.settings.seed == 5 and experiment.schedule.epochs == 21
    assert experiment.choices["method"] == "toyfit" and experiment.model.hidden == (7,)  # type: ignore[attr-defined]


def test_values_under_a_condition_reach_the_run(toys: Path) -> None:
    words = ["experiment=sized", "size=paper", "seed=3", "method=toyfit", "metric=[count]", "allow=[toykit]"]
    experiment = load_experiment(words, toys)
    assert experiment.method.steps == 9 and experiment.schedule.epochs == 90  # type: ignore[attr-defined]
    assert experiment.choices["model"] == "mlp" and experiment.settings.size == "paper"


def test_outside_classes_need_trust(toys: Path) -> None:
    with pytest.raises(UserError) as caught:
        load_experiment(["data=toy", "method=toyfit", "metric=[count]"], toys)
    assert len(caught.value.problems) == 4 and all("allow=[toykit]" in p for p in caught.value.problems)
    assert "toykit" not in sys.modules and str(toys) not in sys.path


def test_problems_of_all_components_come_together(toys: Path) -> None:
    wrong = [
        *TOY,
        "hyper=grid",
        "data.val_fraction=0.0",
        "model.square=true",
        "model.activation=rulu",
        "schedule.lr=-1",
        "schedule.epochs=2.5",
        "likelihood.noise=fixed",
        "+method.foo=1",
    ]
    with pytest.raises(UserError) as caught:
        load_experiment(wrong, toys)
    together = "\n".join(caught.value.problems)
    for hint in ("got rulu", "schedule.epochs must be a whole number; got 2.5", "likelihood.sigma", "method.foo"):
        assert hint in together
    with pytest.raises(UserError) as caught:
        load_experiment([*TOY, "hyper=grid", "data.val_fraction=0.0", "model.square=true", "schedule.lr=-1"], toys)
    together = "\n".join(caught.value.problems)
    for hint in ("model.square=false", "schedule.lr must be positive", "data.val_fraction"):
        assert hint in together


def test_data_and_cache_places(toys: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BNN_DATA_DIR", "somewhere")
    settings = load_experiment(TOY, toys).settings
    assert settings.data_path == Path.cwd() / "somewhere"
    assert settings.cache_path == Path.cwd() / "outputs" / "cache"
    monkeypatch.delenv("BNN_DATA_DIR")
    assert load_experiment(TOY, toys).settings.data_path == Path("~/.cache/bnn_runner/data").expanduser()
    assert load_experiment([*TOY, "data_dir=/abs"], toys).settings.data_path == Path("/abs")


def test_every_default_choice_is_built() -> None:
    experiment = load_experiment([])
    assert experiment.metrics and experiment.settings.time_limit is None


def test_a_table_of_the_user_s_is_found_from_where_the_command_was_started(tmp_path: Path) -> None:
    """Catches: data.path= left relative, so that the cell's command and a later look at it miss the file."""
    rows = [f"{i * 1.5},{i % 7},{i * 0.5}" for i in range(40)]
    (tmp_path / "mine.csv").write_text("\n".join(["a,b,price", *rows]), encoding="utf-8")
    overrides = ["data=csv", "data.path=mine.csv", "data.target=price", "method=map"]
    experiment = load_experiment(overrides, start=tmp_path)
    assert experiment.config["data"]["path"] == str(tmp_path / "mine.csv")
    assert experiment.data.spec().input_shape == (2,)
    assert f"data.path={tmp_path / 'mine.csv'}" in [o.replace('"', "") for o in experiment.run.overrides]
    with pytest.raises(UserError, match=r"data.target must be a column.*got prise.*Did you mean price"):
        load_experiment([*overrides[:2], "data.target=prise"], start=tmp_path)
