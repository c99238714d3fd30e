"""Which device a run uses, and the settings of torch that it changes and puts back."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from bnn_runner.errors import UserError


def pick_device(name: str) -> torch.device:
    """cpu, cuda or mps; auto takes the first accelerator that works. Raises `UserError` for one that is not there."""
    cuda, mps = torch.cuda.is_available(), torch.backends.mps.is_available()
    if name == "auto":
        return torch.device("cuda" if cuda else "mps" if mps else "cpu")
    if (name == "cuda" and not cuda) or (name == "mps" and not mps):
        raise UserError(
            f"device={name} is not to be had: torch sees no such accelerator here. Use device=cpu or device=auto."
        )
    return torch.device(name)


@contextmanager
def thread_count(threads: int | None) -> Iterator[int]:
    """Torch's number of threads while the block runs; what was there is put back."""
    found = torch.get_num_threads()
    if threads is not None:
        torch.set_num_threads(threads)
    try:
        yield torch.get_num_threads()
    finally:
        torch.set_num_threads(found)
