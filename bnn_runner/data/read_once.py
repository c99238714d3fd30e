"""Raw files of a data set are read once for all the cells of a run, which split and scale them differently."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TypeVar

T = TypeVar("T")

_kept: ContextVar[dict[Hashable, object] | None] = ContextVar("raw data of this run", default=None)


@contextmanager
def reading_once() -> Iterator[None]:
    """Within the block, what `once` has read is kept; it is forgotten at the end."""
    token = _kept.set({})
    try:
        yield
    finally:
        _kept.reset(token)


def once(key: Hashable, read: Callable[[], T]) -> T:
    """What `read` gives, from an earlier call with the same key where one is kept. It must not be changed in place.

    >>> with reading_once():
    ...     first, second = once("a file", list), once("a file", list)
    >>> first is second, once("a file", list) is once("a file", list)
    (True, False)
    """
    kept = _kept.get()
    if kept is None:
        return read()
    if key not in kept:
        kept[key] = read()
    found = kept[key]
    return found  # type: ignore[return-value]
