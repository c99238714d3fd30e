"""Freed memory stays with the process of a job."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from pathlib import Path

import pytest

from bnn_runner.sweeps import job
from bnn_runner.sweeps.scratch_files import Member

PAGES = """
import resource, torch
from bnn_runner.sweeps.allocator import keep_freed_memory
keep_freed_memory()
def step():
    held = [torch.ones(4_000_000) for _ in range(4)]
for _ in range(20):  # until the pieces have found their places
    step()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(20):
    step()
print((resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before) // 20)
"""


def pages(**environment: str) -> int:
    """Pages that the kernel gives in a step that makes four tensors of 16 MB and forgets them."""
    done = subprocess.run(
        [sys.executable, "-c", PAGES], capture_output=True, text=True, check=True, env=os.environ | environment
    )
    return int(done.stdout)


@pytest.mark.exhaustive
@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="needs glibc, whose allocator is told")
def test_a_step_takes_the_memory_of_the_one_before() -> None:
    """Planted bugs: one of the thresholds left out; what the user set is overruled."""
    asked = pages(MALLOC_TRIM_THRESHOLD_="131072")
    assert asked > 4 * 4_000_000 * 4 // 65536, "without it every page is new"
    assert pages() < asked / 4


def test_a_job_keeps_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Planted bug: the function that nobody calls."""
    called = []
    monkeypatch.setattr(job, "keep_freed_memory", lambda: called.append(1))
    assert job.run_members([Member(0, ["data=none"])], None, Path.cwd())[0]["status"] == "usage error"
    assert called == [1]
