"""Networks that draw random numbers themselves in training: dropout layers of their own, stochastic depth."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn
from torch.func import functional_call

from bnn_runner.errors import UserError
from bnn_runner.rng import global_stream
from bnn_runner.runtime.torch_state import training_mode


@torch.no_grad()
def draws_random_numbers(module: nn.Module, tensors: Mapping[str, Tensor], x: Tensor) -> bool:
    """Whether a forward pass in training mode takes numbers from PyTorch's global generator.

    Args:
        module: the network; its mode and the state of the generators are left as found.
        tensors: its parameters and buffers by name. Buffers are copied, since norm layers write into them.
        x: points [B, ...].

    Raises:
        UserError: If it draws from elsewhere, where its numbers cannot be repeated.
    """
    outputs, moved = [], False
    x = torch.cat([x, x]) if len(x) == 1 else x
    for _ in range(2):
        copies = {n: t.detach().clone() for n, t in tensors.items()}
        with global_stream(0, "random layers", device=x.device), training_mode(module):
            before = _states(x.device)
            outputs.append(functional_call(module, copies, (x.clone(),)))
            moved = any(not torch.equal(a, b) for a, b in zip(before, _states(x.device), strict=True))
    first, second = outputs
    if not torch.allclose(first, second, 1e-3, 1e-5, equal_nan=True):
        raise UserError(
            "The network must draw its random numbers in training from PyTorch's generator, which is seeded for every "
            "step; its outputs differ between two passes with the same seed. Use torch.rand or nn.Dropout in its "
            "forward, not random or numpy."
        )
    return moved


def _states(device: torch.device) -> list[Tensor]:
    cuda = [torch.cuda.get_rng_state(device)] if device.type == "cuda" else []
    return [torch.get_rng_state(), *cuda]
