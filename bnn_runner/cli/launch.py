"""Behind the check: Hydra runs the jobs, each job is composed, built and run; one's failure stops no other."""

from __future__ import annotations

import contextlib
import os
import re
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from bnn_runner.config.groups import packaged_conf
from bnn_runner.config.overrides import quote
from bnn_runner.config.settings import anchor
from bnn_runner.config.validate import Checked
from bnn_runner.errors import UserError, did_you_mean
from bnn_runner.runtime.exit_codes import OK
from bnn_runner.sweeps.scratch_files import OUTCOME, PLAN
from bnn_runner.sweeps.summary import run_code, sum_up, unfinished

if TYPE_CHECKING:
    from bnn_runner.cli.flags import CommandLine


def launch(arguments: Sequence[str], checked: Checked, line: CommandLine) -> int:
    """Let Hydra run (or show) what `arguments` say; returns the exit code."""
    os.environ["HYDRA_FULL_ERROR"] = "1"  # errors come to us as exceptions, and we tell them in our own words
    # Threads that wait for each other sleep: spinning makes torch ten times slower as soon as another program wants
    # the same cores, and is about a tenth faster when none does (OMP_WAIT_POLICY=ACTIVE has it back). Read when torch
    # is first imported.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    import hydra
    from hydra.errors import HydraException
    from omegaconf.errors import OmegaConfBaseException

    from bnn_runner.experiment import hydra_message
    from bnn_runner.sweeps.job import job
    from bnn_runner.sweeps.sweeper import register

    register()

    program = sys.argv[0]
    scratch = None if line.shows_only else make_scratch(anchor(checked.tree["output_dir"], Path.cwd()))
    own = [] if scratch is None else [f"hydra.{kind}.dir={quote(str(scratch))}" for kind in ("run", "sweep")]
    if scratch is not None and line.multirun:
        os.environ["BNN_RUN_JOBS"] = str(checked.jobs)
    saved, sys.argv = sys.argv, [program, *arguments, *own]
    try:
        hydra.main(config_path=str(packaged_conf()), config_name="config", version_base="1.3")(job)()
        if scratch is None:
            return OK
        return sum_up(scratch, checked.jobs) if line.multirun else run_code(scratch)
    except KeyboardInterrupt:
        if scratch is not None and line.multirun:
            sum_up(scratch, checked.jobs)
        raise
    except (HydraException, OmegaConfBaseException) as error:
        if isinstance(error.__cause__, UserError):  # what a launcher or sweeper of ours refused
            raise error.__cause__ from error
        raise UserError(_unknown_engine(str(error)) or hydra_message(error)) from error
    finally:
        sys.argv = saved
        os.environ.pop("BNN_RUN_JOBS", None)
        if scratch is not None:
            clear_scratch(scratch)


def _unknown_engine(message: str) -> str:
    """What to say of a launcher or sweeper that Hydra does not find (empty for other messages)."""
    missing = re.search(r"Could not find 'hydra/(launcher|sweeper)/([^']*)'", message)
    if missing is None:
        return ""
    kind, name = missing.groups()
    extra = {"submitit_slurm": "slurm", "submitit_local": "slurm"}.get(name)
    if extra is not None:
        return f"hydra/{kind}={name} needs a package. Install it: pip install 'bnn-runner[{extra}]'"
    listed = re.search(r"Available options in '[^']*':((?:\s+[\w-]+(?=\s|$))+)", message.partition("Config search")[0])
    names = listed[1].split() if listed else []
    return f"hydra/{kind}={name} is not a choice.{did_you_mean(name, names)} The choices: {', '.join(names)}."


def make_scratch(output_dir: Path) -> Path:
    """A folder of this command's own for what Hydra writes; two commands of one second do not meet."""
    for attempt in range(20):
        try:
            parent = output_dir / ".hydra"
            parent.mkdir(parents=True, exist_ok=True)
            return Path(tempfile.mkdtemp(prefix=time.strftime("%Y%m%d-%H%M%S-"), dir=parent))
        except (FileNotFoundError, FileExistsError):  # another command, finishing, removed the empty parent just now
            time.sleep(0.005 * (attempt + 1))
        except OSError as error:
            raise UserError(
                f"output_dir={output_dir} cannot be written ({error.strerror}). Give a folder of yours: output_dir=..."
            ) from error
    raise UserError(f"{output_dir}/.hydra cannot be made. Remove what stands there, or give another output_dir=...")


def clear_scratch(scratch: Path) -> None:
    """Remove what Hydra and we left there; a launcher's own logs stay, and the plan where a job may be run again."""
    open_jobs = (scratch / PLAN).exists() and unfinished(scratch)
    for path in [
        scratch / "multirun.yaml",
        *([] if open_jobs else [scratch / PLAN]),
        *scratch.glob(f"*/{OUTCOME}"),
        scratch / OUTCOME,
    ]:
        path.unlink(missing_ok=True)
    for folder in [*(p for p in scratch.glob("*") if p.is_dir()), scratch, scratch.parent]:
        with contextlib.suppress(OSError):  # not empty: not ours
            folder.rmdir()
