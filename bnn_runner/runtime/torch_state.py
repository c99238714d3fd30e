"""Context managers for PyTorch's state (evaluation mode, true float32, plain attention); each restores it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

from torch import nn


@contextmanager
def evaluation_mode(module: nn.Module) -> Iterator[nn.Module]:
    """Puts the module into evaluation mode; restores every submodule's own flag afterwards.

    cuDNN has no derivatives of recurrent layers in evaluation mode, so networks that have some run without it.
    """
    flags = {m: m.training for m in module.modules()}
    module.eval()
    try:
        with _without_cudnn() if any(isinstance(m, nn.RNNBase) for m in flags) else nullcontext():
            yield module
    finally:
        for m, flag in flags.items():
            m.training = flag


@contextmanager
def _without_cudnn() -> Iterator[None]:
    from torch import backends

    cudnn: Any = backends.cudnn  # only this flag: `cudnn.flags` would change precisions and determinism too
    previous = cudnn.enabled
    cudnn.enabled = False
    try:
        yield
    finally:
        cudnn.enabled = previous


@contextmanager
def training_mode(module: nn.Module) -> Iterator[nn.Module]:
    """Puts the module into training mode; restores every submodule's own flag afterwards."""
    flags = {m: m.training for m in module.modules()}
    module.train()
    try:
        yield module
    finally:
        for m, flag in flags.items():
            m.training = flag


@contextmanager
def true_float32() -> Iterator[None]:
    """Turns off TF32, bfloat16 products and autocast, so that float32 is float32 on every device."""
    import torch
    from torch import backends

    # Set each operation's own flag: `torch.set_float32_matmul_precision` and the older flags change several at once.
    cudnn: Any = backends.cudnn
    onednn: Any = backends.mkldnn
    flags: list[Any] = [backends.cuda.matmul, cudnn.conv, cudnn.rnn, onednn.matmul, onednn.conv, onednn.rnn]
    previous = [flag.fp32_precision for flag in flags]
    for flag in flags:
        flag.fp32_precision = "ieee"
    try:
        with torch.autocast("cpu", enabled=False), torch.autocast("cuda", enabled=False):
            yield
    finally:
        for flag, precision in zip(flags, previous, strict=True):
            flag.fp32_precision = precision


@contextmanager
def plain_attention() -> Iterator[None]:
    """Turns off PyTorch's fused attention, which bypasses hooks and supports neither forward derivatives nor vmap."""
    import torch
    from torch.nn.attention import SDPBackend, sdpa_kernel

    previous = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        with sdpa_kernel(SDPBackend.MATH):
            yield
    finally:
        torch.backends.mha.set_fastpath_enabled(previous)
