"""Provenance of results: code, versions, machine, time, memory."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import resource
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import torch

from bnn_runner._version import __version__
from bnn_runner.config.keys import RESULTS_VERSION
from bnn_runner.config.settings import Settings

_PACKAGES = (
    "torch",
    "torchvision",
    "numpy",
    "hydra-core",
    "omegaconf",
    "pandas",
    "matplotlib",
    "scikit-learn",
    "safetensors",
)


@cache
def git_state(folder: Path) -> dict[str, Any]:
    """Returns the commit of the code and whether it has uncommitted changes; {} for an installed package."""

    def git(*arguments: str) -> str:
        command = ["git", *arguments]
        result = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=10, check=True)
        return result.stdout.strip()

    try:
        if not git("ls-files", "__init__.py"):
            return {}
        return {"commit": git("rev-parse", "HEAD"), "dirty": bool(git("status", "--porcelain", "--", "."))}
    except (OSError, subprocess.SubprocessError):
        return {}


@cache
def versions() -> dict[str, str]:
    """Returns the versions of Python, of this package, and of the packages that affect results."""
    installed = {"python": platform.python_version(), "bnn_runner": __version__}
    for name in _PACKAGES:
        try:
            installed[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return installed


def device_name(device: torch.device) -> str:
    """Returns the name of the GPU, or of the processor with its number of cores."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return (
        f"{platform.processor() or platform.machine()} CPU, {os.cpu_count()} cores"
        if device.type == "cpu"
        else device.type
    )


@dataclass(frozen=True)
class Stages:
    """Time and peak memory of each stage of a cell.

    Attributes:
        seconds: Stage -> seconds.
        peaks: Stage -> MiB. `device_mib` is the peak of tensors on the accelerator during the stage. The operating
            system does not report a process's peak by stage, so `process_mib` is its peak since the process started.
    """

    seconds: dict[str, float] = field(default_factory=dict)
    peaks: dict[str, dict[str, float]] = field(default_factory=dict)

    @contextmanager
    def stage(self, name: str, device: torch.device) -> Iterator[None]:
        """Measures the block; waits for the device to finish before and after it."""
        if device.type == "cuda":
            torch.cuda.synchronize(device)
            torch.cuda.reset_peak_memory_stats(device)
        start = time.perf_counter()
        yield
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        self.seconds[name] = time.perf_counter() - start
        self.peaks[name] = _peak_memory(device)

    def summary_lines(self) -> list[str]:
        """Returns lines for the user."""
        lines = ["seconds  " + ", ".join(f"{name} {value:.1f}" for name, value in self.seconds.items())]
        process = max(peak["process_mib"] for peak in self.peaks.values())
        device = [f"{name} {peak['device_mib']:,.0f}" for name, peak in self.peaks.items() if "device_mib" in peak]
        on_device = f"; on the device, by stage: {', '.join(device)}" if device else ""
        return [*lines, f"memory   {process:,.0f} MiB at the peak of the process{on_device}"]


def _peak_memory(device: torch.device) -> dict[str, float]:
    unit = 1 if sys.platform == "darwin" else 1024  # ru_maxrss is in bytes on macOS, in KiB elsewhere
    peaks = {"process_mib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 2**20}
    if device.type == "cuda":
        peaks["device_mib"] = torch.cuda.max_memory_allocated(device) / 2**20
    return peaks


def collect(device: torch.device, settings: Settings, threads: int, stages: Stages) -> dict[str, Any]:
    """Returns the content of provenance.json that does not depend on the cell."""
    return {
        "results_version": RESULTS_VERSION,
        "versions": versions(),
        "git": git_state(Path(__file__).parents[1]),
        "finished": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "platform": platform.platform(),
        "host": platform.node(),
        "device": device_name(device),
        "training_precision": settings.precision,
        "tf32_in_training": {
            "matmul": torch.backends.cuda.matmul.allow_tf32,
            "convolution": torch.backends.cudnn.allow_tf32,
        },
        "compile": settings.compile,
        "posterior_precision": "float32 Jacobians, float64 factorisations; no TF32, no autocast",
        "threads": threads,
        "seconds": {stage: round(value, 3) for stage, value in stages.seconds.items()},
        "peak_memory": {stage: {k: round(v, 1) for k, v in peak.items()} for stage, peak in stages.peaks.items()},
    }
