"""Patches of a convolution and their Gram matrix against torch's own unfolding; the Gram matrix made in strips."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from bnn_runner.curvature import psd
from bnn_runner.curvature.conv_patches import Patches, patches_of
from bnn_runner.curvature.jacobian_forms import OuterProductJacobian

LAYERS = {
    "same": nn.Conv2d(3, 2, 3, padding=1),
    "stride": nn.Conv2d(2, 2, 3, stride=2, padding=1),
    "wide stride": nn.Conv2d(2, 2, 2, stride=3),
    "oblong": nn.Conv2d(2, 2, (5, 2), padding=(2, 0), stride=(1, 2)),
    "dilated": nn.Conv2d(2, 2, 3, dilation=2, padding=2),
    "dilated, stride": nn.Conv2d(2, 2, (3, 2), dilation=(2, 3), stride=(2, 1)),
    "one by one": nn.Conv2d(3, 2, 1, stride=2),
    "even kernel, same": nn.Conv2d(2, 2, (4, 3), padding="same"),
}


@pytest.mark.parametrize("name", LAYERS)
@pytest.mark.parametrize("channels_last", [False, True])
def test_patches_and_their_gram(name: str, channels_last: bool) -> None:
    layer = LAYERS[name].double()
    x = torch.randn(3, layer.in_channels, 11, 9, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    padded = x
    if layer.padding == "same":
        padded = nn.functional.pad(x, (1, 1, 1, 2))
    padding = (0, 0) if layer.padding == "same" else layer.padding
    reference = nn.functional.unfold(padded, layer.kernel_size, layer.dilation, padding, layer.stride)
    if channels_last:
        x = x.contiguous(memory_format=torch.channels_last)
    patches = patches_of(layer, x)
    assert patches.shape == tuple(reference.shape)
    assert torch.equal(patches.unfolded(), reference)
    expected = torch.einsum("bdt,bet->de", reference, reference)
    assert torch.allclose(patches.gram(), expected, rtol=1e-12, atol=1e-12)


def test_an_image_without_copies_has_the_right_patches() -> None:
    whole = torch.arange(2 * 4 * 6 * 5, dtype=torch.float64).reshape(2, 4, 6, 5)
    part = whole[:, 1:3]  # a view that starts inside its storage
    patches = Patches(part, (2, 2), (1, 1), (1, 1))
    assert torch.equal(patches.unfolded(), nn.functional.unfold(part, 2))
    assert OuterProductJacobian(patches, torch.ones(2, 1, 3, 20, dtype=torch.float64)).size == 3 * 8


def test_gram_in_strips_is_the_product(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(psd, "STRIP", 3)
    rows = torch.randn(7, 14, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    assert torch.allclose(psd.gram(rows), rows.T @ rows, rtol=1e-12, atol=1e-12)
    assert torch.allclose(psd.gram(rows.T.contiguous().T), rows.T @ rows, rtol=1e-12, atol=1e-12)
