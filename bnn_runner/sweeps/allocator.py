"""Settings of the C library's memory allocator for the process of a job."""

from __future__ import annotations

import ctypes
import os
import sys
from contextlib import suppress

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # of <malloc.h>
TRIM_BYTES, MMAP_BYTES = 512 * 2**20, 32 * 2**20
"""Largest amount of freed memory that the process keeps, and size from which a block is returned at once."""


def keep_freed_memory() -> None:
    """Makes glibc reuse the memory that a training step has freed, instead of returning it to the kernel.

    The kernel clears every page that it hands out again. With tensors of some megabytes, that takes up to a third of a
    training step. Results do not change. Thresholds that are set in the environment take precedence. Does nothing on
    systems other than Linux or with another C library.
    """
    variables = {"MALLOC_MMAP_THRESHOLD_", "MALLOC_TRIM_THRESHOLD_", "GLIBC_TUNABLES"}
    if sys.platform != "linux" or not variables.isdisjoint(os.environ):
        return
    with suppress(OSError, AttributeError):
        mallopt = ctypes.CDLL(None).mallopt
        mallopt(_M_MMAP_THRESHOLD, MMAP_BYTES)
        mallopt(_M_TRIM_THRESHOLD, TRIM_BYTES)
