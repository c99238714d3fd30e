"""What must hold for every model, found by globbing conf/model; the checks are those of `bnn_runner.testing`."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch import Tensor
from torch.func import jacrev

from bnn_runner.base import Likelihood
from bnn_runner.testing import check_model
from bnn_runner.testing.problems import KINDS, fitting_task
from tests.choices import MODELS, kinds, small_model
from tests.problems import make_network

CASES = [(model, kind) for model in MODELS for kind in kinds(model)]
STACKING = [
    m
    for m in MODELS
    if getattr(small_model(m).build(fitting_task(small_model(m), KINDS[0]).spec), "stacks_lanes", False)
]


def test_every_model_is_tested() -> None:
    """Planted bug: a glob that finds one folder too few."""
    assert {"mlp", "lenet", "resnet20", "resnet18", "vit", "text_transformer"} <= set(MODELS) and len(MODELS) >= 20
    assert {model for model, _ in CASES} == set(MODELS)
    assert {"mlp", "mlp_batchnorm", "mlp_layernorm", "mlp_residual"} <= set(STACKING)


@pytest.mark.parametrize(("name", "kind"), CASES)
def test_the_contract_of_a_model_holds(name: str, kind: str) -> None:
    """Planted bugs: batch statistics in evaluation mode; an axis of the batch mixed into the features; a weight kept
    next to the parameters; a parameter that the output ignores; initial weights from a generator of the model's own;
    batch statistics shared by the lanes; running variance without Bessel's correction; lane and batch axes swapped;
    a missing transpose of a factor; padding or stride forgotten; norm layers differentiated with batch statistics;
    the root multiplied from the other side; a tensor left out."""
    check_model(small_model(name), [kind])


def _negative_log_prob(likelihood: Likelihood, y: Tensor, outputs: Tensor) -> Tensor:
    return -likelihood.log_prob(outputs.unsqueeze(0), y.unsqueeze(0)).sum()


def test_curvature_roots_are_hessians() -> None:
    """Planted bugs: the softmax root of the wrong sign or rank; the noise of one output given to all."""
    for kind in KINDS:
        task = fitting_task(small_model("mlp"), kind)
        network = make_network(small_model("mlp"), task)
        outputs = 3 * network(task.test.inputs)
        root = network.likelihood.curvature_root(outputs)
        for b, (out, y) in enumerate(zip(outputs, task.test.targets, strict=True)):  # type: ignore[arg-type]
            loss = partial(_negative_log_prob, network.likelihood, y)
            hessian = jacrev(jacrev(loss))(out)
            torch.testing.assert_close(root[b] @ root[b].T, hessian, rtol=1e-9, atol=1e-12)
    # Outputs so sure that probabilities underflow must not give NaN.
    sure = network.likelihood.curvature_root(torch.tensor([[800.0, 0.0, -800.0]], dtype=torch.float64))
    assert bool(torch.isfinite(sure).all())
