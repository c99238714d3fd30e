"""The function that Hydra calls for each job, here or in another process (it is pickled by its name)."""

from __future__ import annotations

import json
import os
import shutil
import sys
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode
from omegaconf import DictConfig

from bnn_runner.cli.exits import tell_mistakes
from bnn_runner.errors import Interrupted, RunFailed, UserError

OUTCOME = "outcome.json"
"""What a job leaves in its scratch folder: results come by files, as jobs may run elsewhere."""


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


def write_outcome(folder: Path, outcome: dict[str, Any]) -> None:
    """Leave a job's outcome where `report` finds it."""
    folder.mkdir(parents=True, exist_ok=True)
    partial = folder / f"{OUTCOME}.tmp"
    partial.write_text(json.dumps(outcome), encoding="utf-8")
    shutil.move(partial, folder / OUTCOME)


def run_one(overrides: Sequence[str], config_dir: Path | None, start: Path) -> tuple[str, str, bool]:
    """Compose, build and run one experiment: (status, message, told), where told says that the message was printed.

    Raises KeyboardInterrupt when the run was interrupted; any other end is an outcome.
    """
    try:
        from bnn_runner.config import load_experiment

        experiment = load_experiment(overrides, config_dir, start)
        from bnn_runner import runner

        outcome = runner.run(experiment)
        return outcome.status, outcome.message or "", False
    except UserError as error:
        tell_mistakes(error, "this was not run")
        return "mistake", error.problems[0] if error.problems else "", True
    except RunFailed as error:
        return "failed", str(error), False
    except Interrupted as error:
        if str(error):
            print(f"bnn-run: {error}", file=sys.stderr)
        raise KeyboardInterrupt from None
    except SystemExit as error:
        return "failed", f"something in the run called exit({error.code!r})", False
    except Exception as error:
        traceback.print_exc()
        first = (str(error).splitlines() or [""])[0]
        return "failed", f"{type(error).__name__}: {first}", True
