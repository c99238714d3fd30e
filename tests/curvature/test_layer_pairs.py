"""The full curvature by pairs of layers, compared with the rows of the Jacobian written out."""

from __future__ import annotations

from collections.abc import Iterable

import pytest
import torch

from bnn_runner.curvature import full
from bnn_runner.curvature.jacobian_forms import DenseJacobian, OuterProductJacobian, TensorJacobian
from bnn_runner.curvature.jacobians import Jacobians
from bnn_runner.curvature.layer_pairs import PairSums, pays, pieces_of
from bnn_runner.curvature.output_curvature import OutputCurvature
from bnn_runner.curvature.structures import fit_structure
from bnn_runner.curvature.training_passes import TrainingPasses
from bnn_runner.models.mlp import MLP
from tests.problems import make_network, make_task


def batch(points: int, seed: int, directions: int = 3) -> dict[str, TensorJacobian]:
    """Weights of 4 x 5 and 3 x 4 with biases, and the scale of a norm, float64."""
    random = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=random, dtype=torch.float64)

    first, second = normal(points, directions, 4), normal(points, directions, 3)
    return {
        "a.weight": OuterProductJacobian(normal(points, 5, 1), first.unsqueeze(-1)),
        "a.bias": DenseJacobian(first),
        "norm.weight": DenseJacobian(normal(points, directions, 4)),
        "b.weight": OuterProductJacobian(normal(points, 4, 1), second.unsqueeze(-1)),
        "b.bias": DenseJacobian(second),
    }


def test_pairs_of_layers_give_the_matrix_of_the_rows() -> None:
    """Three batches, the last of one point. Planted bugs: the upper half missing within a layer; o and d exchanged;
    a later batch in place of the ones before; a block of two layers that is not transposed above the diagonal."""
    batches = [batch(6, 0), batch(6, 1), batch(1, 2)]
    sums = PairSums()
    for tensors in batches:
        sums.add(pieces_of(tensors))
    rows = torch.cat([torch.cat([j.dense() for j in b.values()], -1).flatten(0, 1) for b in batches])
    torch.testing.assert_close(sums.matrix(), rows.T @ rows, rtol=1e-12, atol=1e-12)
    assert sums.empty, "the sums are given up"


def test_float32_factors_are_multiplied_in_float64() -> None:
    """Planted bug: products rounded to float32 before they are summed."""
    exact = batch(50, 3)
    narrow = {
        name: OuterProductJacobian(j.inputs.float(), j.grads.float())
        if isinstance(j, OuterProductJacobian)
        else DenseJacobian(j.dense().float())
        for name, j in exact.items()
    }
    wide = {
        name: OuterProductJacobian(j.inputs.double(), j.grads.double())
        if isinstance(j, OuterProductJacobian)
        else DenseJacobian(j.dense().double())
        for name, j in narrow.items()
    }
    found = []
    for tensors in (narrow, wide):
        sums = PairSums()
        sums.add(pieces_of(tensors))
        found.append(sums.matrix())
    torch.testing.assert_close(found[0], found[1], rtol=1e-13, atol=1e-13)


def test_where_rows_are_the_way() -> None:
    """One direction; a convolution, whose pairs of numbers cost more than its rows. Planted bug: pairs of everything,
    which took five times as long for a small convolutional network."""
    assert not pays(batch(4, 0, directions=1).values())
    linear, conv = (
        OuterProductJacobian(torch.ones(2, 40, 1), torch.ones(2, 10, 10, 1)),
        OuterProductJacobian(torch.ones(2, 72, 9), torch.ones(2, 10, 10, 9)),
    )
    assert pays([linear, DenseJacobian(torch.ones(2, 10, 10))])
    assert not pays([linear, conv])


def test_a_fit_takes_pairs_and_comes_to_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    """Six classes, 342 weights. Planted bugs: the route not taken; tensors in another order than the prior's."""
    task = make_task("classification", (20,), 6, num_train=90)
    jacobians = Jacobians(make_network(MLP(hidden=(12,)), task))
    passes = TrainingPasses(task, jacobians, OutputCurvature())
    taken = []

    def decide(tensors: Iterable[TensorJacobian]) -> bool:
        taken.append(pays(tensors))
        return taken[-1]

    monkeypatch.setattr(full, "pays", decide)
    by_pairs = fit_structure("full", passes).gram
    assert taken and all(taken)
    monkeypatch.setattr(full, "pays", lambda tensors: False)
    by_rows = fit_structure("full", passes).gram
    torch.testing.assert_close(by_pairs, by_rows, rtol=1e-10, atol=1e-12)
