"""Every architecture with every structure of curvature, both found by globbing: it runs, or is refused with a reason.

`test_draws_contract` draws at length from one model of each class with every method, and `test_pairs_contract`
from a last-layer posterior of every model; here every structure is fitted to every model, from one pass over the data.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from bnn_runner.curvature.jacobians import BatchJacobians, Jacobians
from bnn_runner.curvature.psd import Repairs
from bnn_runner.curvature.structures import STRUCTURES, fit_structure
from bnn_runner.curvature.subnetwork import choose
from bnn_runner.curvature.training_passes import TrainingPasses
from bnn_runner.errors import RunFailed
from bnn_runner.methods.laplace import Laplace
from bnn_runner.runtime.memory import limited_memory
from bnn_runner.testing.problems import KINDS, fitting_task
from tests.choices import METHODS, MODELS, exhaustive_unless, first_of_class, make, small_model
from tests.problems import context, make_network

WIDE = ("lenet", "resnet20", "resnet20_groupnorm")
"""Models with a layer so wide that its exact block takes a test too long, or more memory than is used."""


def fitted(structure: str, jacobians: Jacobians, batches: list[BatchJacobians], task: Any) -> Any:
    """The curvature, from batches that are there."""
    method: dict[str, Any] = {"rank": 3} if STRUCTURES[structure].ranked else {}
    passes = Laplace(structure=structure, **method).passes(jacobians, task, context(), Repairs())
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(TrainingPasses, "batches", lambda self, use="any": iter(batches))
        return fit_structure(structure, passes)


def check(curvature: Any, jacobians: Jacobians, batch: BatchJacobians) -> None:
    """All weights are in a group once; evidence, draws and covariance are numbers, and there is a spread."""
    assert [name for g in curvature.groups for name in g.members] == list(jacobians.names)
    one = torch.tensor([0.7], dtype=torch.float64)
    assert 0 < float(curvature.log_det_ratio(one)) < float("inf")
    gaussian = curvature.gaussian(one.expand(len(curvature.groups)))
    draws = gaussian.sample(0, 0, 2)
    assert draws.shape == (2, sum(jacobians.sizes().values())) and bool(torch.isfinite(draws).all())
    variances = gaussian.covariance(batch).diagonal(dim1=1, dim2=2)
    assert bool(torch.isfinite(variances).all()) and float(variances.min()) > 0


def test_every_structure_is_a_choice() -> None:
    """Planted bugs: a structure that no command reaches; a glob that finds nothing."""
    assert {str(getattr(make("method", m), "structure", "")) for m in METHODS} >= set(STRUCTURES)
    assert len(STRUCTURES) >= 6 and len(MODELS) >= 22 and set(WIDE) < set(MODELS)


@pytest.mark.parametrize("model", exhaustive_unless(lambda model: first_of_class("model", model), MODELS))
def test_every_structure_is_fitted_or_refused(model: str) -> None:
    """Planted bugs: a tensor in no group; a layer whose curvature is NaN; a block allocated before it is refused."""
    task = fitting_task(small_model(model), KINDS[1])
    network = make_network(small_model(model), task)
    jacobians = Jacobians(network)
    passes = Laplace(structure="full").passes(jacobians, task, context(), Repairs())
    with torch.no_grad():
        batches, batch = list(passes.batches()), jacobians(task.test.inputs)
        for structure in STRUCTURES:
            if STRUCTURES[structure].by_layer and model in WIDE:
                with limited_memory(1 / 8), pytest.raises(RunFailed) as caught:
                    fitted(structure, jacobians, batches, task)
                printed = str(caught.value)
                assert "GiB" in printed and "weights" in printed and "method.structure=kfac" in printed
                continue
            curvature = fitted(structure, jacobians, batches, task)
            check(curvature, jacobians, batch)
            assert all(STRUCTURES[structure].treatment(jacobians, group) for group in curvature.groups)
        chosen = choose(network, tuple(network.parameters), 0.5, "random", None, 0)
        some = Jacobians(network, tuple(chosen.places), chosen.places)
        batches = list(Laplace(structure="full").passes(some, task, context(), Repairs()).batches())
        for structure in (name for name, spec in STRUCTURES.items() if spec.single_weights):
            check(fitted(structure, some, batches, task), some, some(task.test.inputs))
