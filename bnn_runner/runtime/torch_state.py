"""Leave a module's training flags, and the global random state, as they were found."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn


@contextmanager
def evaluation_mode(module: nn.Module) -> Iterator[nn.Module]:
    """The module in evaluation mode; every submodule's own flag is put back afterwards."""
    flags = {m: m.training for m in module.modules()}
    module.eval()
    try:
        yield module
    finally:
        for m, flag in flags.items():
            m.training = flag


@contextmanager
def true_float32() -> Iterator[None]:
    """No TF32, no bfloat16 products and no autocast: float32 is float32 on every device. Flags are put back."""
    import torch
    from torch import backends

    # Each operation's own flag: `torch.set_float32_matmul_precision` and the older flags move several of them.
    cudnn: Any = backends.cudnn
    onednn: Any = backends.mkldnn
    flags: list[Any] = [backends.cuda.matmul, cudnn.conv, cudnn.rnn, onednn.matmul, onednn.conv, onednn.rnn]
    found = [flag.fp32_precision for flag in flags]
    for flag in flags:
        flag.fp32_precision = "ieee"
    try:
        with torch.autocast("cpu", enabled=False), torch.autocast("cuda", enabled=False):
            yield
    finally:
        for flag, precision in zip(flags, found, strict=True):
            flag.fp32_precision = precision


@contextmanager
def plain_attention() -> Iterator[None]:
    """Without torch's fused paths for its own attention layers, which bypass hooks and lack derivatives and vmap."""
    import torch
    from torch.nn.attention import SDPBackend, sdpa_kernel

    found = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        with sdpa_kernel(SDPBackend.MATH):
            yield
    finally:
        torch.backends.mha.set_fastpath_enabled(found)
