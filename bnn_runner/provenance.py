"""Where a number comes from: code, versions, machine, time, memory."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import resource
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

import bnn_runner
from bnn_runner.keys import RECIPE

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


def git_state(folder: Path) -> dict[str, Any]:
    """Commit of the code and whether the tree has changes; empty for an installed package."""

    def git(*words: str) -> str:
        done = subprocess.run(["git", *words], cwd=folder, capture_output=True, text=True, timeout=10, check=True)
        return done.stdout.strip()

    try:
        if not git("ls-files", "__init__.py"):
            return {}
        return {"commit": git("rev-parse", "HEAD"), "dirty": bool(git("status", "--porcelain", "--", "."))}
    except (OSError, subprocess.SubprocessError):
        return {}


def versions() -> dict[str, str]:
    """Python's, ours, and those of the packages that numbers depend on."""
    found = {"python": platform.python_version(), "bnn_runner": bnn_runner.__version__}
    for name in _PACKAGES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def device_name(device: torch.device) -> str:
    """The card's name, or the processor and its number of cores."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return (
        f"{platform.processor() or platform.machine()} CPU, {os.cpu_count()} cores"
        if device.type == "cpu"
        else device.type
    )


def peak_memory(device: torch.device) -> dict[str, float]:
    """Peak memory in MiB: of the process, and of the accelerator where there is one."""
    unit = 1 if sys.platform == "darwin" else 1024  # ru_maxrss is bytes there, KiB elsewhere
    peaks = {"process_mib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 2**20}
    if device.type == "cuda":
        peaks["device_mib"] = torch.cuda.max_memory_allocated(device) / 2**20
    return peaks


def collect(device: torch.device, precision: str, threads: int, seconds: Mapping[str, float]) -> dict[str, Any]:
    """One mapping for provenance.json; the caller adds what only it knows."""
    return {
        "recipe": RECIPE,
        "versions": versions(),
        "git": git_state(Path(bnn_runner.__file__).parent),
        "finished": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "platform": platform.platform(),
        "host": platform.node(),
        "device": device_name(device),
        "training_precision": precision,
        "posterior_precision": "float32 Jacobians, float64 factorisations; no TF32, no autocast",
        "threads": threads,
        "seconds": {stage: round(value, 3) for stage, value in seconds.items()},
        "peak_memory": peak_memory(device),
    }
