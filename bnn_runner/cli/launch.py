"""Starts a checked command: Hydra composes a single run, which runs here; a sweep is launched through Hydra."""

from __future__ import annotations

import contextlib
import os
import re
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bnn_runner.config.groups import packaged_conf
from bnn_runner.config.overrides import quote
from bnn_runner.config.recommend import Expanded
from bnn_runner.config.settings import anchor
from bnn_runner.config.validate import Checked
from bnn_runner.errors import UserError, did_you_mean
from bnn_runner.runtime.exit_codes import FAILED, INTERRUPTED, OK, USAGE_ERROR
from bnn_runner.sweeps.scratch_files import JOBS, OUTCOME, PLAN
from bnn_runner.sweeps.summary import may_be_requeued, print_summary

if TYPE_CHECKING:
    from bnn_runner.cli.flags import CommandLine


def show(arguments: Sequence[str]) -> int:
    """Lets Hydra show what the flags request (--cfg, --info, ...). Returns the exit code."""
    try:
        _through_hydra(arguments, lambda config: None)
    except SystemExit as end:  # --hydra-help and shell completion end the process
        return end.code if isinstance(end.code, int) else OK
    return OK


def run_once(arguments: Sequence[str], expanded: Expanded, checked: Checked, line: CommandLine) -> int:
    """Composes one run with Hydra and runs it.

    Args:
        arguments: Flags and overrides for Hydra.
        expanded: The overrides with recommendations added.
        checked: The checked command line.
        line: The command line.

    Returns:
        The exit code.

    Raises:
        KeyboardInterrupt: If the run was interrupted.
    """
    start, outcomes = Path.cwd(), []

    def task(config: Any) -> None:
        from bnn_runner.experiment.compose import plain_tree, run_config
        from bnn_runner.sweeps.job import run_configs

        run = run_config(plain_tree(config), expanded, line.config_dir, start)
        outcomes.extend(run_configs(lambda: [run], [{}], estimated=True))

    with _scratch(checked) as scratch:
        _through_hydra([*arguments, f"hydra.run.dir={quote(str(scratch))}"], task)
    outcome = outcomes[0] if outcomes else {"status": "failed", "message": "no result"}
    if outcome["status"] == "failed" and not outcome.get("printed"):
        print(f"bnn-run: failed. {outcome['message']}", file=sys.stderr)
    if outcome["status"] == "interrupted":
        raise KeyboardInterrupt
    return {"done": OK, "skipped": OK, "usage error": USAGE_ERROR, "interrupted": INTERRUPTED}.get(
        outcome["status"], FAILED
    )


def sweep(arguments: Sequence[str], checked: Checked) -> int:
    """Runs a sweep through Hydra; each job runs in its own process.

    Args:
        arguments: Flags and overrides for Hydra.
        checked: The checked command line.

    Returns:
        The exit code.

    Raises:
        KeyboardInterrupt: If the sweep was interrupted.
    """
    from bnn_runner.sweeps.job import job

    with _scratch(checked) as scratch:
        os.environ["BNN_RUN_JOBS"] = str(checked.jobs)
        try:
            _through_hydra([*arguments, f"hydra.sweep.dir={quote(str(scratch))}"], job)
            return print_summary(scratch, checked.jobs)
        except KeyboardInterrupt:
            print_summary(scratch, checked.jobs)
            raise
        finally:
            os.environ.pop("BNN_RUN_JOBS", None)


def _through_hydra(arguments: Sequence[str], task: Callable[[Any], None]) -> None:
    """Runs Hydra's main function on `task`. Raises `UserError` for errors of Hydra, a launcher or a sweeper."""
    os.environ["HYDRA_FULL_ERROR"] = "1"  # Hydra raises errors instead of printing them
    # Waiting threads sleep instead of spinning. Spinning is about a tenth faster on idle cores (OMP_WAIT_POLICY=ACTIVE
    # sets it), but ten times slower as soon as another program uses the same cores. Read when torch is imported.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    import hydra
    from hydra.errors import HydraException
    from omegaconf.errors import OmegaConfBaseException

    from bnn_runner.experiment.compose import hydra_message, raised_by_hydra
    from bnn_runner.sweeps.sweeper import register

    register()
    saved, sys.argv = sys.argv, [sys.argv[0], *arguments]
    try:
        hydra.main(config_path=str(packaged_conf()), config_name="config", version_base="1.3")(task)()
    except (HydraException, OmegaConfBaseException) as error:
        if isinstance(error.__cause__, UserError):  # raised by a launcher or sweeper of this package
            raise error.__cause__ from error
        raise UserError(_unknown_plugin(str(error)) or hydra_message(error)) from error
    except Exception as error:
        if not raised_by_hydra(error):
            raise
        raise UserError(hydra_message(error)) from error
    finally:
        sys.argv = saved


def _unknown_plugin(message: str) -> str:
    """A message for a launcher or sweeper that Hydra does not find; '' for other errors of Hydra."""
    missing = re.search(r"Could not find 'hydra/(launcher|sweeper)/([^']*)'", message)
    if missing is None:
        return ""
    kind, name = missing.groups()
    extra = {"submitit_slurm": "slurm", "submitit_local": "slurm"}.get(name)
    if extra is not None:
        return f"hydra/{kind}={name} requires a package. Install it: pip install 'bnn-runner[{extra}]'"
    listed = re.search(r"Available options in '[^']*':((?:\s+[\w-]+(?=\s|$))+)", message.partition("Config search")[0])
    names = listed[1].split() if listed else []
    return f"hydra/{kind}={name} is unknown.{did_you_mean(name, names)} Choices of hydra/{kind}: {', '.join(names)}."


@contextlib.contextmanager
def _scratch(checked: Checked) -> Iterator[Path]:
    """A scratch folder for the files of Hydra and of the jobs of a sweep; cleared at the end."""
    folder = make_scratch(anchor(checked.tree["output_dir"], Path.cwd()))
    try:
        yield folder
    finally:
        clear_scratch(folder)


def make_scratch(output_dir: Path) -> Path:
    """Creates a new folder in `output_dir`/.hydra; commands that start in the same second get different ones.

    Raises:
        UserError: If the folder is not writable.
    """
    for attempt in range(20):
        try:
            parent = output_dir / ".hydra"
            parent.mkdir(parents=True, exist_ok=True)
            return Path(tempfile.mkdtemp(prefix=time.strftime("%Y%m%d-%H%M%S-"), dir=parent))
        except (FileNotFoundError, FileExistsError):  # another command has just finished and removed the empty parent
            time.sleep(0.005 * (attempt + 1))
        except OSError as error:
            raise UserError(
                f"output_dir must be a folder you can write to; got {output_dir} ({error.strerror}). "
                "Set another one: output_dir=..."
            ) from error
    raise UserError(f"Could not create {output_dir}/.hydra. Remove the file of that name, or set output_dir=...")


def clear_scratch(scratch: Path) -> None:
    """Deletes the files of Hydra and of this package; keeps a launcher's logs, and the plan if jobs may run again."""
    keep_plan = (scratch / PLAN).exists() and may_be_requeued(scratch)
    for path in [
        scratch / "multirun.yaml",
        *([] if keep_plan else [scratch / PLAN, *(scratch / JOBS).glob("*.json")]),
        *scratch.glob(f"*/{OUTCOME}"),
        scratch / OUTCOME,
    ]:
        path.unlink(missing_ok=True)
    for folder in [*(p for p in scratch.glob("*") if p.is_dir()), scratch, scratch.parent]:
        with contextlib.suppress(OSError):  # not empty: it has other files
            folder.rmdir()
