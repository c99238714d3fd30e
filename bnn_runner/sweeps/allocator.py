"""The C library's memory, kept from one step for the next in the process of a job."""

from __future__ import annotations

import ctypes
import os
import sys
from contextlib import suppress

_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3  # of <malloc.h>
KEPT, LARGEST = 512 * 2**20, 32 * 2**20
"""Bytes of freed memory that stay with the process at most, and the size from which a piece goes straight back."""


def keep_freed_memory() -> None:
    """Let glibc hand what a step has freed to the next one, where it would give it back to the kernel and ask anew.

    The kernel clears every page that it gives: where tensors take some megabytes, that is up to a third of a training
    step. No number changes. Who set one of these thresholds in the environment is left alone; nothing happens on other
    systems than Linux, or under another C library.
    """
    chosen = {"MALLOC_MMAP_THRESHOLD_", "MALLOC_TRIM_THRESHOLD_", "GLIBC_TUNABLES"}
    if sys.platform != "linux" or not chosen.isdisjoint(os.environ):
        return
    with suppress(OSError, AttributeError):
        mallopt = ctypes.CDLL(None).mallopt
        mallopt(_MMAP_THRESHOLD, LARGEST)
        mallopt(_TRIM_THRESHOLD, KEPT)
