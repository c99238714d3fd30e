"""The top-level settings of a run (config.yaml's own keys), checked. Imports nothing heavy."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from bnn_runner.config.schema import check_fields
from bnn_runner.errors import UserError, raise_all

COMPONENTS = ("data", "model", "method", "prior", "hyper", "schedule", "augment", "metric", "logger")
"""Groups that are built into objects of their own."""


@dataclass(frozen=True)
class EvalSettings:
    """How the posterior is evaluated: draws, points at once, points of each out-of-distribution set, calibration."""

    num_draws: int
    batch_size: int
    max_ood: int | None
    max_shift: int | None
    calibrate: Literal["none", "temperature"]

    def __post_init__(self) -> None:
        problems = [
            f"eval.{name} must be at least 1; got {value}."
            for name, value in (("num_draws", self.num_draws), ("batch_size", self.batch_size))
            if value < 1
        ]
        problems += [
            f"eval.{name} must be 0 or more points, or null for all; got {value}."
            for name, value in (("max_ood", self.max_ood), ("max_shift", self.max_shift))
            if value is not None and value < 0
        ]
        raise_all(problems)


@dataclass(frozen=True)
class NoiseSettings:
    """Names and types of `likelihood.*` for the light check; `likelihoods.NoiseRule` is what runs."""

    noise: Literal["learned", "fixed", "residual"]
    sigma: float | None
    form: Literal["homoscedastic", "mean_variance", "natural"]


@dataclass(frozen=True)
class Settings:
    """Every top-level setting. Paths are absolute; `time_limit` is in minutes, None for no limit."""

    seed: int
    size: Literal["small", "paper"]
    replicates: int
    device: Literal["auto", "cpu", "cuda", "mps"]
    precision: Literal["float32", "bf16"]
    compile: bool
    threads: int | None
    data_dir: Path | None
    output_dir: Path
    cache_dir: Path | None
    time_limit: float | None
    memory_gb: float | None
    force: bool
    plan_only: bool
    retry_failed: bool
    fail_fast: bool
    objective: str | None
    prepare: bool
    stack: Literal["auto", "always", "never"]
    figures: bool
    save_posterior: bool
    allow: tuple[str, ...]
    eval: EvalSettings

    def __post_init__(self) -> None:
        problems = []
        if self.seed < 0:
            problems.append(f"seed must be 0 or more; got {self.seed}.")
        if self.replicates < 1:
            problems.append(f"replicates must be at least 1; got {self.replicates}.")
        if self.threads is not None and self.threads < 1:
            problems.append(f"threads must be at least 1, or null for all cores; got {self.threads}.")
        if self.time_limit is not None and not 0 < self.time_limit < float("inf"):
            problems.append(f"time_limit must be positive (minutes), or null for no limit; got {self.time_limit:g}.")
        if self.memory_gb is not None and not 0 < self.memory_gb < float("inf"):
            problems.append(f"memory_gb must be positive (GiB), or null for no limit; got {self.memory_gb:g}.")
        raise_all(problems)

    @property
    def data_path(self) -> Path:
        """Where the data lie (never None after `read_settings`)."""
        assert self.data_dir is not None
        return self.data_dir

    @property
    def cache_path(self) -> Path:
        """Where trained networks are kept (never None after `read_settings`)."""
        assert self.cache_dir is not None
        return self.cache_dir


def read_settings(config: Mapping[str, Any], start: Path) -> tuple[Settings | None, list[str]]:
    """Settings out of a resolved configuration, paths anchored to `start`, and every problem."""
    problems: list[str] = []
    values = {k: v for k, v in config.items() if k not in (*COMPONENTS, "likelihood", "eval")}
    arguments, found = check_fields(Settings, values | {"eval": None}, "", "bnn-run")
    problems += found
    inner, found = check_fields(EvalSettings, config.get("eval") or {}, "eval.", "bnn-run's eval")
    problems += found
    evaluation, found = attempt(EvalSettings, inner) if not found else (None, [])
    problems += found
    if problems and not set(Settings.__dataclass_fields__) <= set(arguments):
        return None, problems
    output_dir = anchor(arguments["output_dir"], start)
    data_dir = arguments["data_dir"] or os.environ.get("BNN_DATA_DIR") or "~/.cache/bnn_runner/data"
    cache_dir = arguments["cache_dir"] or output_dir / "cache"
    arguments |= {
        "output_dir": output_dir,
        "data_dir": anchor(data_dir, start),
        "cache_dir": anchor(cache_dir, start),
        "eval": evaluation,
    }
    settings, found = attempt(Settings, arguments)
    problems += found
    return (None if problems else settings), problems


def anchor(path: str | Path, start: Path) -> Path:
    """An absolute path: `~` expanded, relative ones taken from the folder the command was started in."""
    return Path(os.path.abspath(start / Path(path).expanduser()))


def attempt(cls: type, arguments: Mapping[str, Any]) -> tuple[Any, list[str]]:
    """An instance, or the problems its own checks raise."""
    try:
        return cls(**arguments), []
    except UserError as error:
        return None, list(error.problems)
    except ValueError as error:  # classes from outside may not know UserError
        return None, [f"{cls.__name__}: {error}"]
