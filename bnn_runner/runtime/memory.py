"""The memory limit of a run, and recovery when memory runs out.

Chunks are sized so that a batch stays within the limit. Matrices that exceed it are refused before they are allocated;
large ones are reported. If memory runs out anyway, the chunks are halved and the computation starts again.
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
"""Limit for all matrices of one fit together if the user sets no memory limit."""

KEPT_BYTES = 2**30
"""Limit for what a fit keeps between its passes over the data (or a quarter of the memory limit, if less)."""

REPORTED_BYTES = 2**29
"""Allocations of at least this size are reported before they are made."""


class TooLarge(RunFailed):
    """An allocation would exceed the memory limit."""


def _say_nothing(text: str) -> None:
    pass


@dataclass(frozen=True)
class MemoryLimit:
    """Limit for a posterior's own arrays.

    Attributes:
        gigabytes: The limit in GiB; None if the user set none.
        say: Prints one line for the user.
    """

    gigabytes: float | None = None
    say: Callable[[str], None] = _say_nothing

    @property
    def most_bytes(self) -> int:
        """Limit for all matrices of one fit together."""
        return LARGEST_BYTES if self.gigabytes is None else int(self.gigabytes * 2**30)

    @property
    def kept_bytes(self) -> int:
        """Limit for what a fit keeps between its passes over the data instead of computing it again."""
        return min(KEPT_BYTES, self.most_bytes // 4)

    def floats(self, share: float) -> float:
        """How many float32 numbers fit into `share` of the memory limit; infinity if no limit is set."""
        return math.inf if self.gigabytes is None else share * self.most_bytes / 4

    def reserve(self, what: str, needed: int, advice: str) -> None:
        """Checks an allocation before it is made, and reports a large one.

        Args:
            what: Name of the matrix, as the user knows it.
            needed: Its size in bytes.
            advice: What to do if it does not fit; one or more whole sentences.

        Raises:
            TooLarge: If `needed` exceeds the memory limit.
        """
        size = f"{needed / 2**30:.2g} GiB" if needed < 10 * 2**30 else f"{needed / 2**30:,.0f} GiB"
        if needed > self.most_bytes:
            limit = f"memory_gb={self.gigabytes:g}" if self.gigabytes is not None else "set memory_gb=NUMBER for more"
            raise TooLarge(
                f"{what} requires about {size}; the limit is {self.most_bytes / 2**30:g} GiB ({limit}). {advice}"
            )
        if needed >= REPORTED_BYTES:
            self.say(f"memory   {what}: about {size}")


_UNLIMITED = MemoryLimit()
_limit: ContextVar[MemoryLimit] = ContextVar("memory limit", default=_UNLIMITED)


def memory_limit() -> MemoryLimit:
    """The current memory limit."""
    return _limit.get()


@contextmanager
def limited_memory(gigabytes: float | None, say: Callable[[str], None] = _say_nothing) -> Iterator[None]:
    """Sets the memory limit inside the block.

    Args:
        gigabytes: The limit in GiB; None for no limit.
        say: Prints one line for the user.
    """
    token = _limit.set(MemoryLimit(gigabytes, say))
    try:
        yield
    finally:
        _limit.reset(token)


def out_of_memory(error: BaseException) -> bool:
    """Whether PyTorch or Python raised `error` because memory ran out, on any device."""
    if isinstance(error, (torch.OutOfMemoryError, MemoryError)):
        return True
    return isinstance(error, RuntimeError) and "can't allocate memory" in str(error)


def halving(work: Callable[[], _T], halve: Callable[[], bool]) -> _T:
    """Calls `work()`; whenever memory runs out, calls `halve()` and starts `work()` again from its beginning.

    Args:
        work: The computation; it must leave nothing behind when it raises.
        halve: Halves the chunk size; returns False if it cannot get smaller.

    Returns:
        The result of `work`.

    Raises:
        RunFailed: If memory runs out at the smallest chunk size.
    """
    while True:
        try:
            return work()
        except Exception as error:
            if not out_of_memory(error):
                raise
            message = str(error)
        if not halve():  # outside the handler: the traceback of a caught error keeps its tensors alive
            raise RunFailed(
                f"Out of memory even with one point at a time ({' '.join(message.split())[:120] or 'no details'}). "
                "Use method.structure=diag or method.weights=last_layer, or a machine with more memory."
            )
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
