"""Named streams of random numbers: a new stream changes no other.

Each stream's seed is a hash of (seed, name, further words), so init, split, order, posterior and evaluation never
share numbers, and adding one more leaves all others as they were.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager

import torch

_WORD = 2**63 - 1


def derive_seed(seed: int, name: str, *words: int | str) -> int:
    """Returns a 63-bit seed from (seed, name, words), the same on every machine and in every version."""
    text = "/".join([str(seed), name, *map(str, words)])
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big") & _WORD


def generator(seed: int, name: str, *words: int | str) -> torch.Generator:
    """Returns a new CPU generator for the named stream (see `derive_seed`)."""
    return torch.Generator().manual_seed(derive_seed(seed, name, *words))


@contextmanager
def global_stream(seed: int, name: str, *words: int | str, device: torch.device | None = None) -> Iterator[None]:
    """Seeds PyTorch's global generators with the named stream inside the block; restores their state afterwards.

    For code that cannot take a generator: on the CPU and, if a `device` is given that has one of its own, there.
    """
    cuda = [device] if device is not None and device.type == "cuda" else []
    with torch.random.fork_rng(devices=cuda):
        torch.manual_seed(derive_seed(seed, name, *words))
        yield
