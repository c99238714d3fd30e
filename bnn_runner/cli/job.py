"""The function that Hydra calls for each job, here or in another process (it is pickled by its name)."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode
from omegaconf import DictConfig

from bnn_runner.cli.launch import run_one, write_outcome


def job(config: DictConfig) -> None:
    """Run one job and leave its outcome in the job's scratch folder.

    What Hydra composed is not used: the job's overrides are expanded by what the data set recommends, and
    composed again. Nothing but KeyboardInterrupt leaves this function, so that a sweep goes on.
    """
    del config
    hydra: Any = HydraConfig.get()
    overrides = list(hydra.overrides.task)
    folder, start = Path(hydra.runtime.output_dir), Path(hydra.runtime.cwd)
    added = [s.path for s in hydra.runtime.config_sources if s.provider == "command-line"]
    multirun = hydra.mode == RunMode.MULTIRUN
    number = int(hydra.job.num) if multirun else 0
    shown = " ".join(text.lstrip("+") for text in overrides) or "the default"
    if multirun:
        print(f"\n[{number + 1}/{os.environ.get('BNN_RUN_JOBS', '?')}] {shown}", file=sys.stderr, flush=True)
    outcome: dict[str, Any] = {"number": number, "overrides": shown}
    try:
        status, message, told = run_one(overrides, Path(added[0]) if added else None, start)
    except KeyboardInterrupt:
        write_outcome(folder, outcome | {"status": "interrupted", "message": "interrupted", "told": True})
        raise
    write_outcome(folder, outcome | {"status": status, "message": message, "told": told})
