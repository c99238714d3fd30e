"""The top-level settings of a run (keys of config.yaml itself) and their checks. Imports nothing heavy."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from bnn_runner.config.schema import check_fields
from bnn_runner.errors import UserError, raise_all
from bnn_runner.runtime.files import expand_home

COMPONENTS = ("data", "model", "method", "prior", "hyper", "schedule", "augment", "metric", "logger")
"""Groups whose choices become objects."""


@dataclass(frozen=True)
class EvalSettings:
    """How the posterior is evaluated.

    Attributes:
        num_draws: Number of posterior draws S.
        batch_size: Points per batch B.
        max_ood: Points of the validation part and of each out-of-distribution set; None for all.
        max_shift: Test points at each level of a shift; None for all.
        calibrate: 'temperature' also reports scores after temperature scaling.
    """

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
    """Names and types of `likelihood.*` for the check without torch; `likelihoods.NoiseRule` implements them."""

    noise: Literal["learned", "fixed", "residual"]
    sigma: float | None
    form: Literal["homoscedastic", "mean_variance", "natural"]


@dataclass(frozen=True)
class Settings:
    """The top-level settings; config.yaml explains each.

    After `read_settings`, paths are absolute. `time_limit` is in minutes, `memory_gb` in GiB; None means no limit.
    """

    seed: int
    size: Literal["small", "medium", "paper"]
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
        """The folder of the data (never None after `read_settings`)."""
        assert self.data_dir is not None
        return self.data_dir

    @property
    def cache_path(self) -> Path:
        """The folder of the trained networks (never None after `read_settings`)."""
        assert self.cache_dir is not None
        return self.cache_dir


def read_settings(config: Mapping[str, Any], start: Path) -> tuple[Settings | None, list[str]]:
    """Reads and checks the top-level settings.

    Args:
        config: The resolved configuration.
        start: The folder to which relative paths refer.

    Returns:
        The settings (None if there is a problem), and one message for each problem.
    """
    problems: list[str] = []
    values = {k: v for k, v in config.items() if k not in (*COMPONENTS, "likelihood", "eval")}
    arguments, new_problems = check_fields(Settings, values | {"eval": None}, "", "bnn-run")
    problems += new_problems
    eval_arguments, new_problems = check_fields(EvalSettings, config.get("eval") or {}, "eval.", "bnn-run's eval")
    problems += new_problems
    evaluation, new_problems = attempt(EvalSettings, eval_arguments) if not new_problems else (None, [])
    problems += new_problems
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
    settings, new_problems = attempt(Settings, arguments)
    problems += new_problems
    return (None if problems else settings), problems


def anchor(path: str | Path, start: Path) -> Path:
    """Returns an absolute path: `~` expanded, relative paths taken from the folder `start`."""
    return Path(os.path.abspath(start / expand_home(path)))


def attempt(cls: type, arguments: Mapping[str, Any]) -> tuple[Any, list[str]]:
    """Constructs `cls(**arguments)`. Returns the instance (None if its checks fail), and the messages of its checks."""
    try:
        return cls(**arguments), []
    except UserError as error:
        return None, list(error.problems)
    except ValueError as error:  # a user's own class may not know UserError
        return None, [f"{cls.__name__}: {error}"]
