"""Named streams of random numbers: a new consumer moves nobody.

Each stream's seed is a hash of (seed, name, further words), so that init, split, order, posterior
and evaluation never share numbers, and asking for one more changes none of the others.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager

import torch

_WORD = 2**63 - 1


def derive_seed(seed: int, name: str, *words: int | str) -> int:
    """A 63-bit seed from (seed, name, words), stable over machines and versions."""
    text = "/".join([str(seed), name, *map(str, words)])
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big") & _WORD


def generator(seed: int, name: str, *words: int | str) -> torch.Generator:
    """A CPU generator of its own for the named stream."""
    return torch.Generator().manual_seed(derive_seed(seed, name, *words))


@contextmanager
def global_stream(seed: int, name: str, *words: int | str) -> Iterator[None]:
    """Code that can only use torch's global generator runs in a named stream; the global state is put back."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(derive_seed(seed, name, *words))
        yield
