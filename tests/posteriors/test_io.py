"""Saved posteriors: the same draws after loading, on another module; another run's file is refused."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from bnn_runner.base import Posterior
from bnn_runner.evaluation.evaluate import evaluate
from bnn_runner.posteriors import io as posterior_store
from bnn_runner.posteriors.io import CannotBeSaved, UnreadablePosterior
from bnn_runner.testing.methods import check_saved
from tests.choices import METHODS, by_default, exhaustive_unless, fitted, small_model

MODELS = ("mlp", "mlp_batchnorm", "module")
BELONGS = {"networks": "n", "data": "d", "method": "m", "recipe": "1"}
CPU = torch.device("cpu")


@pytest.mark.parametrize("kind", ["regression", "classification"])
@pytest.mark.parametrize(
    ("method", "model"), exhaustive_unless(by_default, [(method, model) for method in METHODS for model in MODELS])
)
def test_the_same_draws_bit_for_bit(method: str, model: str, kind: str) -> None:
    """Planted bugs: a factor kept in float32; a precision left out; matrices that come back in another layout."""
    check_saved(fitted(method, model, kind), ["tests"])


def test_every_method_is_tested() -> None:
    assert {"map", "ensemble", "laplace_full", "laplace_kfac", "laplace_diag", "laplace_network"} <= set(METHODS)


def saved(folder: Path) -> tuple[Any, Posterior, torch.nn.Module]:
    case = fitted("laplace_kfac", "mlp", "regression")
    task, networks, posterior = case.task, case.networks, case.posterior
    posterior_store.save(posterior, folder, BELONGS)
    return task, posterior, networks[0].module


def refused(folder: Path, module: torch.nn.Module, belongs: dict[str, str] = BELONGS) -> str:
    with pytest.raises(UnreadablePosterior) as caught:
        posterior_store.load(folder, belongs, module, CPU)
    return str(caught.value)


def test_another_run_s_posterior_and_damaged_files_are_refused(tmp_path: Path) -> None:
    """Planted bug: the fingerprint not compared, so that a posterior of other data is used in silence."""
    task, _, module = saved(tmp_path)
    assert "its data differ" in refused(tmp_path, module, BELONGS | {"data": "other"})
    assert "its networks and method differ" in refused(tmp_path, module, BELONGS | {"networks": "x", "method": "y"})
    assert "another shape" in refused(tmp_path, small_model("mlp_layernorm").build(task.spec))
    tensors = tmp_path / posterior_store.TENSORS
    whole = tensors.read_bytes()
    tensors.write_bytes(whole[:-1] + b"\x01")
    assert "Could not read" in refused(tmp_path, module)
    tensors.write_bytes(whole[: len(whole) // 2])
    assert "Could not read" in refused(tmp_path, module)
    tensors.unlink()
    assert "save_posterior=true" in refused(tmp_path, module)


def test_a_file_cannot_name_a_class_to_run(tmp_path: Path) -> None:
    """Planted bug: any importable callable made from the file."""
    _, _, module = saved(tmp_path)
    path = tmp_path / posterior_store.FACTS
    facts = json.loads(path.read_text())
    for name in ("subprocess:Popen", "bnn_runner.runtime.files:write_text", "bnn_runner.runtime.files:os.system"):
        facts["posterior"] = {"class": name, "fields": {"args": ["true"]}}
        path.write_text(json.dumps(facts))
        told = refused(tmp_path, module)
        assert "of a package that is not trusted" in told or "this version does not have" in told
    facts["posterior"] = {"class": "bnn_runner.models.likelihoods:Gaussian", "fields": {"log_sigma": 0.0}}
    path.write_text(json.dumps(facts))
    assert "written by another version" in refused(tmp_path, module)


@dataclass(frozen=True)
class Closure:
    """A posterior with a part that is no plain value."""

    inner: Any


def test_a_posterior_that_cannot_be_saved_names_the_part(tmp_path: Path) -> None:
    with pytest.raises(CannotBeSaved, match=r"Closure\.inner\['f'\] must be .*; it is a function"):
        posterior_store.save(Closure({"f": lambda x: x}), tmp_path, BELONGS)  # type: ignore[arg-type]
    assert not list(tmp_path.iterdir())


@pytest.mark.exhaustive
def test_loaded_in_another_process(tmp_path: Path) -> None:
    """Everything needed is in the files: a new process with another module evaluates to the same numbers."""
    task, posterior, _ = saved(tmp_path)
    expected = evaluate(task, posterior, "draws", 8, 1, 5, 100).test.loglik
    program = f"""
import torch
from bnn_runner.posteriors import io as posterior_store
from bnn_runner.evaluation.evaluate import evaluate
from bnn_runner.testing.problems import fitting_task
from tests.choices import small_model
model = small_model("mlp")
task = fitting_task(model, "regression")
posterior = posterior_store.load(__import__("pathlib").Path({str(tmp_path)!r}), {BELONGS!r},
    model.build(task.spec).double(), torch.device("cpu"))
torch.save(evaluate(task, posterior, "draws", 8, 1, 5, 100).test.loglik, {str(tmp_path / "out.pt")!r})
"""
    subprocess.run([sys.executable, "-c", program], check=True, cwd=Path(__file__).parents[2])
    found: Tensor = torch.load(tmp_path / "out.pt", weights_only=True)
    assert expected is not None and torch.equal(found, expected)
