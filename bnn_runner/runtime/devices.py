"""The device of a run, and PyTorch's number of threads."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from bnn_runner.errors import UserError


def pick_device(name: str) -> torch.device:
    """Returns the PyTorch device for `device=name`.

    Args:
        name: cpu, cuda, mps or auto. auto follows the environment variable BNN_DEVICE; if that is not set, it selects
            the first available of cuda, mps and cpu.

    Raises:
        UserError: If the device is not available, or BNN_DEVICE names an unknown one.
    """
    cuda, mps = torch.cuda.is_available(), torch.backends.mps.is_available()
    setting = f"device={name}"
    if name == "auto" and (name := os.environ.get("BNN_DEVICE") or "auto") != "auto":
        setting = f"BNN_DEVICE={name}"
        if name not in ("cpu", "cuda", "mps"):
            raise UserError(
                f"The environment variable BNN_DEVICE must be cpu, cuda, mps or auto; got {name}. It sets device=auto."
            )
    if name == "auto":
        return torch.device("cuda" if cuda else "mps" if mps else "cpu")
    if (name == "cuda" and not cuda) or (name == "mps" and not mps):
        raise UserError(f"{setting} is not available: PyTorch found no {name.upper()} device. Use device=cpu.")
    return torch.device(name)


@contextmanager
def thread_count(threads: int | None) -> Iterator[int]:
    """Sets PyTorch's number of threads inside the block (None leaves it) and yields it; restores it afterwards."""
    previous = torch.get_num_threads()
    if threads is not None:
        torch.set_num_threads(threads)
    try:
        yield torch.get_num_threads()
    finally:
        torch.set_num_threads(previous)
