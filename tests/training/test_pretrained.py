"""A network trained elsewhere: read without running its code, matched by name, tried on the task, then a posterior."""

from __future__ import annotations

import csv
import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from bnn_runner.cli.main import run
from bnn_runner.cli.report import main as report_main
from bnn_runner.errors import UserError
from bnn_runner.experiment import load_experiment
from bnn_runner.models.likelihoods import Categorical
from bnn_runner.training.pretrained import canonical, match_weights, read_weights, score_pretrained
from tests.problems import make_network, make_task
from tests.user_networks import Rows, SmallConv

OWN = ["allow=[tests]", "model._target_=tests.user_networks.Rows", "model.inputs=2", "model.outputs=2"]
SMALL = ["data=two_moons", "data.num_train=60", "data.num_test=40", "eval.num_draws=20", "metric=[marginal]"]


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def trained(seed: int = 0, steps: int = 200) -> nn.Module:
    """A plain network, trained by a plain loop on the run's own two moons."""
    task = load_experiment([*SMALL, "schedule.epochs=1"]).data.load(Path("/nonexistent"), 0)
    torch.manual_seed(seed)
    network = Rows(2, 2)
    optimizer = torch.optim.Adam(network.parameters(), 0.05)
    for _ in range(steps):
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(network(task.train.inputs), task.train.targets)
        loss.backward()
        optimizer.step()
    return network


def weights_of(module: nn.Module) -> dict[str, Tensor]:
    return {n: t.detach().clone() for n, t in module.state_dict().items()}


# ------------------------------------------------------------------------------------- reading


def as_wrapped(state: Mapping[str, Tensor], path: Path) -> None:
    named = {f"module._orig_mod.{n}": t for n, t in state.items()}
    torch.save({"epoch": 3, "optimizer": {"lr": 0.1}, "state_dict": named}, path)


def test_common_ways_of_saving_are_the_same_network(tmp_path: Path) -> None:
    """Planted bug: the digest over the file's bytes or over prefixed names, so that a copy is another network."""
    state = weights_of(SmallConv())
    save_file(state, tmp_path / "a.safetensors")
    torch.save(state, tmp_path / "b.pt")
    as_wrapped(state, tmp_path / "c.ckpt")
    torch.save({"model": {f"model.{n}": t for n, t in state.items()}, "step": 1}, tmp_path / "d.pth")
    read = [read_weights(tmp_path / name) for name in ("a.safetensors", "b.pt", "c.ckpt", "d.pth")]
    assert len({given.digest for given in read}) == 1
    for given in read:
        put = match_weights(SmallConv(), given, "model=module")
        assert put.keys() == state.keys() and all(torch.equal(put[n], t) for n, t in state.items())
    assert [bool(given.notes) for given in read] == [False, False, True, True]
    torch.save({n: t.half() if t.is_floating_point() else t for n, t in state.items()}, tmp_path / "half.pt")
    assert "float16 numbers, which are converted to float32" in read_weights(tmp_path / "half.pt").notes[0]
    state["conv.bias"][0] += 1e-3
    torch.save(state, tmp_path / "e.pt")
    assert read_weights(tmp_path / "e.pt").digest != read[0].digest


def test_a_prefix_that_belongs_to_the_network_is_kept_on_both_sides() -> None:
    own = nn.ModuleDict({"model": nn.Linear(2, 1)})
    assert canonical(own.state_dict()) == {"model.weight": "weight", "model.bias": "bias"}
    assert canonical({"model.a": 0, "b": 0}) == {"model.a": "model.a", "b": "b"}


def refused(path: Path) -> str:
    with pytest.raises(UserError) as caught:
        read_weights(path)
    return str(caught.value)


def test_files_that_run_code_or_are_no_state_dict_are_refused(tmp_path: Path) -> None:
    """Planted bug: weights_only=False, under which the first file would run `touch`."""

    class Evil:
        def __reduce__(self) -> Any:
            return (Path.touch, (tmp_path / "ran",))

    torch.save({"weight": torch.ones(2), "evil": Evil()}, tmp_path / "evil.pt")
    assert "could run code" in refused(tmp_path / "evil.pt") and not (tmp_path / "ran").exists()
    torch.save(SmallConv(), tmp_path / "whole.pt")
    assert "state_dict()" in refused(tmp_path / "whole.pt")
    (tmp_path / "cut.pt").write_bytes((tmp_path / "whole.pt").read_bytes()[:300])
    (tmp_path / "cut.safetensors").write_bytes(b"\x00" * 40)
    torch.save({"lr": 0.1, "epochs": [1, 2]}, tmp_path / "none.pt")
    torch.save(torch.ones(3), tmp_path / "tensor.pt")
    torch.save({"a": torch.tensor([1.0, float("nan")])}, tmp_path / "nan.pt")
    for name, word in {
        "cut.pt": "Could not read",
        "cut.safetensors": "Could not read",
        "none.pt": "must contain a state dict",
        "tensor.pt": "must contain a state dict",
        "nan.pt": "NaN",
        "absent.pt": "does not exist",
    }.items():
        assert word in refused(tmp_path / name), name


def test_every_name_that_does_not_fit_is_told(tmp_path: Path) -> None:
    state = weights_of(SmallConv(num_outputs=5))
    state.pop("conv.bias")
    state.pop("norm.num_batches_tracked")  # no number depends on it
    state["extra.weight"] = torch.zeros(1)
    torch.save(state, tmp_path / "w.pt")
    with pytest.raises(UserError) as caught:
        match_weights(SmallConv(num_outputs=2), read_weights(tmp_path / "w.pt"), "model=module")
    told = str(caught.value)
    assert "Missing in the file: conv.bias." in told and "Not in the network: extra.weight." in told
    assert "out.weight is [5, 8] in the file and [2, 8] in the network" in told and "num_batches" not in told


# -------------------------------------------------------------------------------- on the task


def test_a_network_that_does_not_fit_the_data_is_warned_about() -> None:
    """Planted bug: the warning left out, or given to every network."""
    task = make_task("classification", (3,), 2, num_train=200, num_test=100)
    labels = (task.train.inputs[:, 0] > 0).long()
    split = type(task.train)(task.train.inputs, labels, task.train.ids)
    task = type(task)(**{**task.__dict__, "train": split, "val": split.subset(torch.arange(0)), "test": split})

    class Build:
        def problems(self, spec: Any) -> list[str]:
            return []

        def build(self, spec: Any) -> nn.Module:
            return nn.Linear(3, 2)

    network = make_network(Build(), task)
    network.parameters["weight"] = torch.tensor([[-2.0, 0, 0], [2.0, 0, 0]], dtype=torch.float64)
    network.parameters["bias"] = torch.zeros(2, dtype=torch.float64)
    good = score_pretrained(network, task)
    assert good.parts["train"]["accuracy"] == 1.0 and not good.warnings
    expected = float(Categorical().log_prob(network(split.inputs), labels).mean())
    assert good.parts["test"]["loglik"] == pytest.approx(expected)
    network.parameters["weight"] *= -1
    assert "no better than a constant prediction (on train and test)" in score_pretrained(network, task).warnings[0]


def cells(folder: Path) -> dict[str, Path]:
    return {p.parent.parent.name: p.parent for p in folder.glob("outputs/runs/*/*/*/*/DONE")}


@pytest.mark.exhaustive
def test_a_posterior_on_a_plain_network_in_one_command(here: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Nothing is trained; the posterior's centre is the given network; the file may go away or be moved."""
    network = trained()
    torch.save(network.state_dict(), here / "mine.pt")
    words = [*SMALL, *OWN, "figures=false", "model.weights=mine.pt", "prior.precision=0.5"]
    assert run(["-m", *words, "method=map,laplace_last_layer,laplace_kfac,mc_dropout"]) == 0
    told = capfd.readouterr().out
    assert "trained networks: 1 pretrained (mine.pt), nothing to train" in told
    assert re.search(r"train accuracy (0\.9|1\.0)", told), told
    made = cells(here)
    assert made.keys() == {"map", "laplace_last_layer", "laplace_kfac", "mc_dropout"}
    facts = json.loads((made["laplace_kfac"] / "cell.json").read_text())
    assert (made["map"] / "history.csv").read_text() == "member\n", "nothing was trained"
    [given] = facts["pretrained"]
    assert given["parts"]["train"]["accuracy"] > 0.9 and facts["report"]["structure"] == "kfac"
    with torch.no_grad():
        task = load_experiment(words).data.load(Path("/nonexistent"), 0)
        expected = nn.functional.cross_entropy(network(task.test.inputs), task.test.targets)
    rows = csv.DictReader((made["map"] / "metrics.csv").read_text().splitlines())
    marginal = next(float(r["value"]) for r in rows if r["metric"] == "marginal_loglik" and r["split"] == "test")
    assert marginal == pytest.approx(-float(expected), abs=1e-5)

    # Another place and format, the same content: the same cell. Another content: another cell.
    (here / "elsewhere").mkdir()
    save_file(weights_of(network), here / "elsewhere" / "copy.safetensors")
    moved = [w.replace("mine.pt", "elsewhere/copy.safetensors") for w in words]
    assert run([*moved, "method=laplace_kfac"]) == 0
    assert "already finished" in capfd.readouterr().out
    torch.save(trained(steps=100).state_dict(), here / "mine.pt")
    assert run([*words, "method=laplace_kfac"]) == 0
    assert "already finished" not in capfd.readouterr().out
    assert len(list(here.glob("outputs/runs/*/*/laplace_kfac/*/DONE"))) == 2


@pytest.mark.exhaustive
def test_an_ensemble_takes_a_file_for_each_member(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for i in range(2):
        torch.save(trained(seed=i).state_dict(), here / f"{i}.pt")
    words = [*SMALL, *OWN, "figures=false", "method=ensemble"]
    assert run([*words, "model.weights=0.pt"]) == 2
    assert "requires 5 trained networks; model.weights gives 1" in capsys.readouterr().err
    assert run([*words, "model.weights=[0.pt,1.pt]", "method.size=2"]) == 0
    facts = json.loads((cells(here)["ensemble"] / "cell.json").read_text())
    assert facts["report"]["members"] == 2 and facts["report"]["member_distance"] > 0
    assert len(facts["pretrained"]) == 2


def test_regression_noise_is_the_residual_one(here: Path) -> None:
    torch.manual_seed(1)
    network = Rows(1, 1)
    torch.save(network.state_dict(), here / "mine.pt")
    own = ["allow=[tests]", "model._target_=tests.user_networks.Rows", "model.inputs=1", "model.outputs=1"]
    assert run([*own, "model.weights=mine.pt", "method=map", "metric=[rmse,marginal]", "figures=false"]) == 0
    facts = json.loads((cells(here)["map"] / "cell.json").read_text())
    parts = facts["pretrained"][0]["parts"]
    # At σ² = mean squared residual the mean log-likelihood of the training part is −½ log(2πe σ²).
    expected = -0.5 * torch.log(2 * torch.pi * torch.e * torch.tensor(parts["train"]["rmse"]) ** 2)
    assert parts["train"]["loglik"] == pytest.approx(float(expected), abs=1e-4)
    assert any("likelihood.noise=learned requires training" in note for note in facts["notes"])


def test_own_classes_are_checked_before_and_after_import(here: Path) -> None:
    """All mistakes are told as such; an untrusted package is not even imported."""
    target = "model._target_=tests.user_networks."
    (here / "untrusted.py").write_text("raise SystemExit('imported')")
    for words, told in {
        ("model=module",): "Set model._target_=package.module.Class",
        ("model._target_=untrusted.Net",): "the package untrusted is not trusted",
        ("allow=[tests]", target + "Rows", "model.inputs=1", "model.outputs=1", "model.widht=3"): "Did you mean width?",
        ("allow=[tests]", target + "Rows", "model.outputs=1"): "requires model.inputs=VALUE",
        ("allow=[tests]", target + "Rows", "model.inputs=3", "model.outputs=1"): "on inputs [1] of data=gap1d",
        ("allow=[tests]", target + "Rows", "model.inputs=1", "model.outputs=2"): "must return [2, 1]",
        ("allow=[tests]", target + "Flat"): "must return [2, 1] for two points",
        ("allow=[tests]", target + "number"): "must build a torch.nn.Module; got int",
        ("allow=[tests]", target + "small_conv", "model.depth=3"): "unexpected keyword argument 'depth'",
        ("model=mlp", "model.weights=3"): "must be a path or a list of paths",
    }.items():
        with pytest.raises(UserError, match=re.escape(told)):
            load_experiment([*words, "method=map"])


def test_a_plain_class_can_be_trained_here_too(here: Path) -> None:
    assert run([*SMALL, *OWN, "method=laplace", "schedule.epochs=3", "schedule.batch_size=16", "figures=false"]) == 0
    [cell] = here.glob("outputs/runs/two_moons/module/laplace/0-*")
    assert (cell / "DONE").is_file() and "model._target_=" in (cell / "command.txt").read_text()


@pytest.mark.exhaustive
def test_a_torchvision_resnet18_saved_by_plain_torch(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """One command for the posterior, one for the table. The full size, with KFAC, is scripts/check_real_data.py's."""
    from torchvision.models import resnet18

    (here / "conf" / "data").mkdir(parents=True)
    (here / "conf" / "data" / "tiles.yaml").write_text("_target_: tests.user_data.Tiles\nval_fraction: 0.1\n")
    torch.manual_seed(0)
    torch.save(nn.DataParallel(resnet18(num_classes=2)).state_dict(), here / "r18.pt")
    own = ["allow=[tests,torchvision]", "model._target_=torchvision.models.resnet18", "model.num_classes=2"]
    words = ["--config-dir", "conf", *own, "data=tiles", "metric=[marginal,accuracy,joint]", "figures=false"]
    words += ["method=laplace_last_layer", "eval.num_draws=20", "hyper=fixed"]
    assert run([*words, "model.weights=r18.pt"]) == 0
    told = capsys.readouterr().out
    assert "11,177,538 parameters" in told and "log evidence" in told and "over last-layer weights" in told
    assert "no better than a constant prediction" in told, "its weights are random"
    assert report_main(["--metrics", "marginal_loglik,accuracy", "--no-figure"]) == 0
    assert "| tiles | module | laplace_last_layer [" in capsys.readouterr().out.replace("  ", "")
    assert run([*words, "model.weights=r18.pt", "model.num_classes=3"]) == 2
    assert "must return [2, 2] for two points" in capsys.readouterr().err
