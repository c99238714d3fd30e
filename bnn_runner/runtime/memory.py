"""The memory that posteriors may take at once: a memory limit for the run, and what happens where it is not there.

Chunks are sized so that a batch stays within the memory limit; matrices that do not fit it are refused
before they are made, and large ones are told of. Where memory runs out all the same, chunks are
halved and the work is done again.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import TypeVar

import torch

from bnn_runner.errors import RunFailed

_T = TypeVar("_T")

LARGEST_BYTES = 4 * 2**30
"""What matrices of one fit may take together where no memory limit is set."""

KEPT_BYTES = 2**30
"""What a fit keeps between its passes over the data, at most: a quarter of the memory limit if that is less."""

TOLD_BYTES = 2**29
"""Allocations from this size on are told of before they are made."""


class TooLarge(RunFailed):
    """What is asked for would take more memory than the memory limit."""


def _say_nothing(text: str) -> None:
    pass


@dataclass(frozen=True)
class MemoryLimit:
    """`gigabytes` (GiB) for a posterior's own arrays; None where the user set none. `say` tells a line to them."""

    gigabytes: float | None = None
    say: Callable[[str], None] = _say_nothing

    @property
    def most_bytes(self) -> int:
        """What matrices of one fit may take together."""
        return LARGEST_BYTES if self.gigabytes is None else int(self.gigabytes * 2**30)

    @property
    def kept_bytes(self) -> int:
        """What a fit may keep between its passes over the data, so as not to make it anew."""
        return min(KEPT_BYTES, self.most_bytes // 4)

    def floats(self, share: float) -> float:
        """Numbers (of 4 bytes) in a share of the memory limit; without end where none is set."""
        return math.inf if self.gigabytes is None else share * self.most_bytes / 4

    def reserve(self, what: str, needed: int, advice: str) -> None:
        """Tell of a large allocation of `needed` bytes before it is made.

        Raises `TooLarge`, which gives the `advice`, where it is more than the memory limit.
        """
        size = f"{needed / 2**30:.2g} GiB" if needed < 10 * 2**30 else f"{needed / 2**30:,.0f} GiB"
        if needed > self.most_bytes:
            limit = f"memory_gb={self.gigabytes:g}" if self.gigabytes is not None else "set memory_gb=NUMBER for more"
            raise TooLarge(
                f"{what} requires about {size}; the limit is {self.most_bytes / 2**30:g} GiB ({limit}). {advice}"
            )
        if needed >= TOLD_BYTES:
            self.say(f"memory   {what}: about {size}")


_UNLIMITED = MemoryLimit()
_limit: ContextVar[MemoryLimit] = ContextVar("memory limit", default=_UNLIMITED)


def memory_limit() -> MemoryLimit:
    """The memory limit in force."""
    return _limit.get()


@contextmanager
def limited_memory(gigabytes: float | None, say: Callable[[str], None] = _say_nothing) -> Iterator[None]:
    """`gigabytes` are the memory limit while the block runs."""
    token = _limit.set(MemoryLimit(gigabytes, say))
    try:
        yield
    finally:
        _limit.reset(token)


def out_of_memory(error: BaseException) -> bool:
    """Whether this is what torch or Python raise when memory runs out, on any device."""
    if isinstance(error, (torch.OutOfMemoryError, MemoryError)):
        return True
    return isinstance(error, RuntimeError) and "can't allocate memory" in str(error)


def halving(work: Callable[[], _T], halve: Callable[[], bool]) -> _T:
    """`work()`; where memory runs out it starts again from its beginning after `halve()`, while that can be done."""
    while True:
        try:
            return work()
        except Exception as error:
            if not out_of_memory(error):
                raise
            told = str(error)
        if not halve():  # outside the handler: a caught error holds what was allocated below it
            raise RunFailed(
                f"Out of memory even with one point at a time ({' '.join(told.split())[:120] or 'no details'}). "
                "Use method.structure=diag or method.weights=last_layer, or a machine with more memory."
            )
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
