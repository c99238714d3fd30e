"""Every curvature of a float32 network against that of the same network in float64, from weak priors to strong ones.

A float32 product of Jacobians leaves eigenvalues of 1e-7 of the largest where the curvature has none. They are more
than a weak prior's precision, and count as information.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass, fields, replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from bnn_runner.base import Network
from bnn_runner.curvature.block_fits import squares
from bnn_runner.curvature.conv_patches import patches_of
from bnn_runner.curvature.jacobian_forms import (
    DenseJacobian,
    EmbeddingJacobian,
    OuterProductJacobian,
    TensorJacobian,
    widened,
)
from bnn_runner.curvature.structures import STRUCTURES
from bnn_runner.experiment import load_experiment
from bnn_runner.hyper.fixed import Fixed
from bnn_runner.methods.laplace import Laplace
from bnn_runner.models.cnn import CNN
from bnn_runner.models.mlp import MLP
from bnn_runner.tasks import Split, Task
from bnn_runner.training.engine import LaneTrainer
from bnn_runner.training.state import Lane, TrainingConfig
from tests.problems import context, make_network, make_task

PRECISIONS = (1e-6, 1e-4, 1e-2, 1.0, 1e2, 1e6)


def converted(task: Task, network: Network, dtype: torch.dtype) -> tuple[Task, Network]:
    """The same numbers in another dtype."""

    def moved(value: Any) -> Any:
        return value.to(dtype) if torch.is_tensor(value) and value.is_floating_point() else value

    def split(points: Split) -> Split:
        x, y = points.gather(torch.arange(len(points)))
        return Split(moved(x), moved(y), torch.arange(len(points)))

    kind = network.likelihood
    changed = replace(
        network,
        module=copy.deepcopy(network.module).to(dtype),
        parameters={n: moved(p) for n, p in network.parameters.items()},
        buffers={n: moved(b) for n, b in network.buffers.items()},
        likelihood=type(kind)(**{f.name: moved(getattr(kind, f.name)) for f in fields(kind)}),
    )
    return replace(task, train=split(task.train), test=split(task.test)), changed


@dataclass(frozen=True)
class Numbers:
    """Evidence without the log-likelihood (nats), effective dimension, and variances of the outputs [B, K]."""

    occam: float
    dimension: float
    variances: Tensor

    @classmethod
    def of(cls, method: Laplace, task: Task, network: Network, precision: float) -> Numbers:
        network = replace(network, prior_precision=dict.fromkeys(network.parameters, precision))
        posterior = method.fit(task, [network], context(Fixed()))
        facts = posterior.report.facts
        with torch.no_grad():
            covariance = posterior.gaussian.covariance(posterior.jacobians(task.test.inputs))
        variances = covariance.diagonal(dim1=1, dim2=2).double()
        return cls(facts["evidence_nats"] - facts["train_loglik_nats"], facts["effective_dimension"], variances)


def compare(method: Laplace, task: Task, network: Network, precision: float) -> None:
    """As near as the rounding of the network's own float32 derivatives allows, which weak priors magnify.

    Of a derivative's relative error ε the posterior sees ε² s/λ: 1e-14 of 1e4 over λ = 1e-6.
    """
    single = Numbers.of(method, *converted(task, network, torch.float32), precision)
    wide = Numbers.of(method, *converted(*converted(task, network, torch.float32), torch.float64), precision)
    allowed = 1e-4 if precision >= 1e-4 else 2e-3
    assert single.occam == pytest.approx(wide.occam, rel=1e-6, abs=allowed)
    assert single.dimension == pytest.approx(wide.dimension, rel=1e-6, abs=allowed)
    torch.testing.assert_close(single.variances, wide.variances, rtol=5e-4 if precision >= 1e-4 else 5e-3, atol=0)


@pytest.mark.parametrize("architecture", ["mlp", pytest.param("cnn", marks=pytest.mark.exhaustive)])
@pytest.mark.parametrize("kind", ["regression", "classification"])
@pytest.mark.parametrize("structure", STRUCTURES)
def test_a_float32_network_has_the_curvature_of_its_float64_copy(structure: str, kind: str, architecture: str) -> None:
    """Planted bug: products of Jacobians in float32, widened afterwards."""
    shape, model = (
        ((4,), MLP(hidden=(12, 12))) if architecture == "mlp" else ((1, 8, 8), CNN(channels=(4, 4), kernels=(3, 3)))
    )
    task = make_task(kind, shape, 2, num_train=60)
    network = make_network(model, task)
    for precision in PRECISIONS:
        compare(Laplace(structure=structure), task, network, precision)


def trained(*overrides: str) -> tuple[Task, Network]:
    """A data set's own network, trained as recommended."""
    experiment = load_experiment([*overrides, "method=map"])
    task = experiment.data.load(experiment.settings.data_path, 0)
    config = TrainingConfig(experiment.model, experiment.schedule, experiment.prior, experiment.noise)
    group = LaneTrainer(config, [Lane(task, 0)], torch.device("cpu"))
    group.train(None, lambda stage, done, total: None)
    return task, group.network(0)


@pytest.mark.exhaustive
def test_a_trained_network_has_no_information_from_rounding() -> None:
    """gap1d: float32 products cost block 1.6, 16, 120 and 580 nats at λ = 0.1, 0.01, 1e-3 and 1e-4 (KFAC up to 110)."""
    task, network = trained("data=gap1d")
    for structure in ("block", "kfac", "ekfac"):
        for precision in (1e-2, 1e-4):
            compare(Laplace(structure=structure), task, network, precision)


def test_sums_over_data_are_float64() -> None:
    """Planted bug: patches' Gram matrix in the images' dtype; squares in the Jacobian's."""
    conv = nn.Conv2d(2, 3, 3)
    patches = patches_of(conv, torch.randn(5, 2, 6, 6))
    full = patches.unfolded().double()
    torch.testing.assert_close(patches.gram(), torch.einsum("bdt,bet->de", full, full), rtol=1e-13, atol=1e-13)
    for positions in (1, 4):
        jacobian = OuterProductJacobian(torch.randn(7, 3, positions), torch.randn(7, 2, 4, positions))
        expected = jacobian.dense().double().square().sum((0, 1))
        assert squares(jacobian).dtype == torch.float64
        torch.testing.assert_close(squares(jacobian), expected, rtol=1e-5, atol=0)


def test_products_with_float64_vectors_are_float64() -> None:
    """Of every form of Jacobian: J v and Jᵀu of its float64 copy. Planted bug: the factors left in float32."""
    forms: list[TensorJacobian] = [
        OuterProductJacobian(torch.randn(3, 4, 2), torch.randn(3, 2, 5, 2)),
        OuterProductJacobian(patches_of(nn.Conv2d(2, 3, 3), torch.randn(3, 2, 5, 5)), torch.randn(3, 2, 3, 9)),
        DenseJacobian(torch.randn(3, 2, 7)),
        EmbeddingJacobian(torch.randint(0, 6, (3, 4)), torch.randn(3, 2, 4, 5), 6),
    ]
    for form in forms:
        wide_form, vectors = widened(form), torch.randn(2, form.size, dtype=torch.float64)
        rows = wide_form.dense()
        assert rows.dtype == torch.float64
        torch.testing.assert_close(rows, form.dense().double(), rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(wide_form.apply(vectors), rows @ vectors.T, rtol=1e-12, atol=1e-12)
        values = torch.randn(3, 2, 2, dtype=torch.float64)
        expected = values.flatten(0, 1).T @ rows.flatten(0, 1)
        torch.testing.assert_close(wide_form.vjp(values), expected, rtol=1e-12, atol=1e-12)
