"""The full curvature by pairs of layers, beside the rows of the Jacobian written out."""

from __future__ import annotations

import torch

from bnn_runner.linearised.factors import Dense, Factored, TensorJacobian
from bnn_runner.linearised.layer_pairs import MOST_DENSE, PairSums, pieces_of


def batch(points: int, seed: int, directions: int = 3) -> dict[str, TensorJacobian]:
    """Weights of 4 x 5 and 3 x 4 with biases, and the scale of a norm, float64."""
    random = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=random, dtype=torch.float64)

    first, second = normal(points, directions, 4), normal(points, directions, 3)
    return {
        "a.weight": Factored(normal(points, 5, 1), first.unsqueeze(-1)),
        "a.bias": Dense(first),
        "norm.weight": Dense(normal(points, directions, 4)),
        "b.weight": Factored(normal(points, 4, 1), second.unsqueeze(-1)),
        "b.bias": Dense(second),
    }


def test_pairs_of_layers_give_the_matrix_of_the_rows() -> None:
    """Three batches, the last of one point. Planted bugs: the upper half missing within a layer; o and d exchanged;
    a later batch in place of the ones before; a block of two layers that is not transposed above the diagonal."""
    batches = [batch(6, 0), batch(6, 1), batch(1, 2)]
    sums = PairSums()
    for tensors in batches:
        pieces = pieces_of(tensors)
        assert pieces is not None
        sums.add(pieces)
    rows = torch.cat([torch.cat([j.dense() for j in b.values()], -1).flatten(0, 1) for b in batches])
    torch.testing.assert_close(sums.matrix(), rows.T @ rows, rtol=1e-12, atol=1e-12)
    assert sums.empty, "the sums are given up"


def test_float32_factors_are_multiplied_in_float64() -> None:
    """Planted bug: products rounded to float32 before they are summed."""
    exact = batch(50, 3)
    narrow = {
        name: Factored(j.inputs.float(), j.grads.float()) if isinstance(j, Factored) else Dense(j.dense().float())
        for name, j in exact.items()
    }
    wide = {
        name: Factored(j.inputs.double(), j.grads.double()) if isinstance(j, Factored) else Dense(j.dense().double())
        for name, j in narrow.items()
    }
    found = []
    for tensors in (narrow, wide):
        sums, pieces = PairSums(), pieces_of(tensors)
        assert pieces is not None
        sums.add(pieces)
        found.append(sums.matrix())
    torch.testing.assert_close(found[0], found[1], rtol=1e-13, atol=1e-13)


def test_where_rows_are_the_way() -> None:
    """One direction, several positions, a large tensor without factors."""
    assert pieces_of(batch(4, 0, directions=1)) is None
    assert pieces_of({"conv.weight": Factored(torch.ones(2, 500, 7), torch.ones(2, 3, 4, 7))}) is None
    assert pieces_of({"odd": Dense(torch.ones(2, 3, MOST_DENSE + 1))}) is None
