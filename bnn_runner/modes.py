"""Leave a module's training flags, and the global random state, as they were found."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

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
    """No TF32 and no autocast: posterior algebra means float32 where it says so. Flags are put back."""
    import torch

    matmul, cudnn = torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    try:
        with torch.autocast("cpu", enabled=False), torch.autocast("cuda", enabled=False):
            yield
    finally:
        torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32 = matmul, cudnn


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
