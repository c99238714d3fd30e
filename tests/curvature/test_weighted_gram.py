"""J diag(s)² Jᵀ of a layer: every order of sums gives what the Jacobian written out gives."""

from __future__ import annotations

import pytest
import torch

from bnn_runner.curvature.blocks import KroneckerBlock
from bnn_runner.curvature.jacobian_forms import OuterProductJacobian
from bnn_runner.curvature.weighted_gram import by_pairs, weighted_gram

ROUTES = {  # points, directions, outputs, inputs, positions: whether pairs are taken
    "one position": ((3, 4, 6, 5, 1), None),
    "pairs of two positions": ((2, 40, 6, 9, 2), True),
    "pairs in four pieces": ((2, 40, 5, 8, 18), True),
    "pairs in pieces that do not divide": ((2, 60, 4, 7, 13), True),
    "dense": ((2, 3, 4, 6, 400), False),
}


def made(
    shape: tuple[int, int, int, int, int], dtype: torch.dtype = torch.float64
) -> tuple[OuterProductJacobian, torch.Tensor]:
    b, c, o, d, t = shape
    stream = torch.Generator().manual_seed(0)
    read, grads, scale = (
        torch.randn(size, generator=stream, dtype=torch.float64).to(dtype) for size in ((b, d, t), (b, c, o, t), (o, d))
    )
    return OuterProductJacobian(read, grads), scale.abs() + 0.1


def written_out(jacobian: OuterProductJacobian, scale: torch.Tensor) -> torch.Tensor:
    """The definition, by one contraction of everything."""
    g, a = jacobian.grads, jacobian.inputs
    return torch.einsum("bcot,bdt,od,bkou,bdu->bck", g, a, scale.square(), g, a)


@pytest.mark.parametrize(("shape", "pairs"), ROUTES.values(), ids=ROUTES.keys())
def test_every_route_gives_the_contraction(shape, pairs):
    """Planted bugs: pairs of two pieces counted once; a scale that is not squared."""
    jacobian, scale = made(shape)
    if pairs is not None:
        _, c, o, d, t = shape
        assert by_pairs(t, o, d, c) is pairs, "this shape no longer takes the route that is tested"
    found = weighted_gram(jacobian, scale)
    assert torch.allclose(found, written_out(jacobian, scale), rtol=1e-12, atol=1e-12)
    assert torch.allclose(found, found.mT, rtol=1e-13)


@pytest.mark.parametrize(("shape", "first"), [((2, 3, 4, 6, 2), True), ((2, 3, 4, 6, 400), False)])
def test_a_kronecker_block_that_rotates_before_or_after_gives_j_sigma_j(shape, first):
    """Planted bug: the basis of the inputs taken for that of the outputs."""
    jacobian, _ = made(shape)
    _, _, o, d, _ = shape
    stream = torch.Generator().manual_seed(1)
    q_a, q_g = (torch.linalg.qr(torch.randn(n, n, generator=stream, dtype=torch.float64))[0] for n in (d, o))
    spectrum = torch.rand(o * d, generator=stream, dtype=torch.float64)
    block = KroneckerBlock(q_a, q_g, spectrum)
    assert block._rotates_first(jacobian) is first
    basis = torch.kron(q_g, q_a)
    sigma = basis @ torch.diag(1 / (spectrum + 0.7)) @ basis.T
    dense = jacobian.dense()
    expected = dense @ sigma @ dense.mT
    assert torch.allclose(block.covariance(jacobian, 0.7), expected, rtol=1e-10)
    root = block.covariance_root(jacobian, 0.7)
    assert torch.allclose(root @ root.mT, expected, rtol=1e-10)


def test_pairs_in_float32_are_as_right_as_float32():
    """Rounding of sums over the d inputs, errors of either sign: √d times the spacing of float32."""
    jacobian, scale = made((1, 40, 64, 512, 8), torch.float32)
    exact = weighted_gram(OuterProductJacobian(jacobian.inputs.double(), jacobian.grads.double()), scale.double())
    assert by_pairs(8, 64, 512, 40)
    off = (weighted_gram(jacobian, scale) - exact).abs().max() / exact.abs().max()
    assert float(off) < 512**0.5 * torch.finfo(torch.float32).eps
