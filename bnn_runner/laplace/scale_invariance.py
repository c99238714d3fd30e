"""Parameters whose scale has no influence on the network, because a normalisation layer divides it out."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.func import functional_call

from bnn_runner.base import Network

_NORMS = (nn.modules.batchnorm._BatchNorm, nn.LayerNorm, nn.GroupNorm)
SCALE = 3.0
TOLERANCE = 1e-6
NO_EPS = 1e-30


def scale_invariant(network: Network, x: Tensor, names: Sequence[str]) -> tuple[str, ...]:
    """The tensors of `names` in layers whose weight (with its bias) can be rescaled without changing the outputs.

    The invariance is that of training, with batch statistics; in evaluation mode with frozen statistics, a
    batchnorm network does depend on the scale. So the outputs at x [B, ...] (at least two points) are compared,
    in float64, between w and 3 w of one layer at a time, without the norm layers' eps; a layer counts where they
    agree to 1e-6 relative. A network without normalisation layers costs nothing.
    """
    norms = [m for m in network.module.modules() if isinstance(m, _NORMS)]
    if not norms:
        return ()
    owners = dict.fromkeys(name.rpartition(".")[0] for name in names)
    modules = dict(network.module.named_modules())
    candidates = [o for o in owners if not isinstance(modules[o], _NORMS) and f"{o}.weight" in network.parameters]
    found, eps, training = [], [m.eps for m in norms], {m: m.training for m in network.module.modules()}
    tensors = {n: t.double() if t.is_floating_point() else t for n, t in network.tensors.items()}
    inputs = x.double() if x.is_floating_point() else x

    def outputs(changed: dict[str, Tensor]) -> Tensor:
        # Batch statistics update running ones: of copies.
        fresh = {n: tensors[n].clone() for n in network.buffers}
        return functional_call(network.module, tensors | fresh | changed, (inputs,))

    try:
        for norm in norms:
            norm.eps = NO_EPS
        for module in network.module.modules():
            module.training = isinstance(module, nn.modules.batchnorm._BatchNorm)
        with torch.no_grad():
            before = outputs({})
            for owner in candidates:
                both = [f"{owner}.{kind}" for kind in ("weight", "bias") if f"{owner}.{kind}" in network.parameters]
                after = outputs({n: SCALE * tensors[n] for n in both})
                if float((after - before).norm()) <= TOLERANCE * float(before.norm()):
                    found += [n for n in both if n in names]
    finally:
        for norm, value in zip(norms, eps, strict=True):
            norm.eps = value
        for module, mode in training.items():
            module.training = mode
    return tuple(found)
