"""hyper=auto: replaced by the rule for the kind of the task, in the experiment and in its cell."""

from __future__ import annotations

from pathlib import Path

import pytest

from bnn_runner.config.groups import Catalogue
from bnn_runner.config.keys import cell_hash
from bnn_runner.errors import UserError
from bnn_runner.experiment import Experiment, load_experiment
from bnn_runner.hyper.auto import Auto
from bnn_runner.hyper.evidence import Evidence
from bnn_runner.hyper.grid import Grid
from bnn_runner.testing import check_rule


def cell(experiment: Experiment) -> str:
    return cell_hash(experiment.config, experiment.uses_hyper, experiment.method.finite)


@pytest.mark.parametrize(("data", "name", "rule"), [("digits", "grid", Grid), ("gap1d", "evidence", Evidence)])
def test_the_recommended_rule_is_that_of_the_kind(data: str, name: str, rule: type) -> None:
    """Planted bugs: one rule for both kinds; a cell of its own for the same posterior."""
    experiment = load_experiment([f"data={data}"])
    assert type(experiment.hyper) is rule and experiment.choices["hyper"] == name and not experiment.run.notes
    assert cell(experiment) == cell(load_experiment([f"data={data}", f"hyper={name}"]))
    assert type(experiment.one_seed(3).hyper) is rule
    assert "hyper=auto" in experiment.run.overrides


def test_every_data_set_leaves_the_rule_to_the_kind() -> None:
    catalogue = Catalogue()
    blocks = [catalogue.load("data", name)["recommended"] for name in catalogue.choices("data")]
    assert all("hyper" not in block for block in blocks)


def test_the_kind_of_a_table_is_known_once_it_is_read(tmp_path: Path) -> None:
    for name, labels in (("numbers", [f"{i * 0.37:.2f}" for i in range(40)]), ("classes", ["cat", "dog"] * 20)):
        rows = "".join(f"{i},{label}\n" for i, label in enumerate(labels))
        (tmp_path / f"{name}.csv").write_text(f"x,y\n{rows}", encoding="utf-8")
    found = [load_experiment(["data=csv", f"data.path={tmp_path / n}.csv"]).hyper for n in ("numbers", "classes")]
    assert [type(rule) for rule in found] == [Evidence, Grid]


def test_without_validation_data_the_evidence_is_used_and_told() -> None:
    experiment = load_experiment(["data=digits", "data.val_fraction=0"])
    assert isinstance(experiment.hyper, Evidence)
    [note] = experiment.run.notes
    assert "data.val_fraction=0.1" in note and "hyper=evidence is used" in note
    assert not load_experiment(["data=digits", "data.val_fraction=0", "method=map"]).run.notes
    assert not load_experiment(["data=gap1d", "data.val_fraction=0"]).run.notes


def test_other_rules_and_wrong_ones() -> None:
    experiment = load_experiment(["data=digits", "hyper=auto", "hyper.classes=fixed"])
    assert experiment.choices["hyper"] == "fixed"
    with pytest.raises(UserError, match="hyper=gird is unknown"):
        load_experiment(["data=digits", "hyper=auto", "hyper.classes=gird"])
    assert check_rule(Auto()).precisions.shape == (2,)


@pytest.mark.parametrize(
    "method", ["laplace", "laplace_sampled", "laplace_functional", "laplace_subnetwork", "ensemble_laplace"]
)
def test_every_method_supports_the_recommended_rules(method: str) -> None:
    for data in ("digits", "gap1d"):
        load_experiment([f"data={data}", f"method={method}"])
