"""Which device a run uses, and the settings of torch that it changes and puts back."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from bnn_runner.errors import UserError


def pick_device(name: str) -> torch.device:
    """cpu, cuda or mps; auto is the environment variable BNN_DEVICE, else the first accelerator that works.

    Raises `UserError` for a device that is not there, or that BNN_DEVICE misspells.
    """
    cuda, mps = torch.cuda.is_available(), torch.backends.mps.is_available()
    told = f"device={name}"
    if name == "auto" and (name := os.environ.get("BNN_DEVICE") or "auto") != "auto":
        told = f"BNN_DEVICE={name}"
        if name not in ("cpu", "cuda", "mps"):
            raise UserError(f"{told}: the variable must be cpu, cuda or mps. It is used for device=auto.")
    if name == "auto":
        return torch.device("cuda" if cuda else "mps" if mps else "cpu")
    if (name == "cuda" and not cuda) or (name == "mps" and not mps):
        raise UserError(f"{told} is not available: PyTorch found no such accelerator. Use device=cpu.")
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
