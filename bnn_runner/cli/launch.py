"""Behind the check: Hydra runs the jobs, each job is composed, built and run; one's failure stops no other."""

from __future__ import annotations

import contextlib
import json
import os
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bnn_runner.catalogue import packaged_conf
from bnn_runner.checking import Checked
from bnn_runner.cli.exits import FAILED, INTERRUPTED, MISTAKE, OK
from bnn_runner.errors import UserError
from bnn_runner.overrides import quote
from bnn_runner.settings import anchor

if TYPE_CHECKING:
    from bnn_runner.cli.flags import CommandLine

_OUTCOME = "outcome.json"  # as cli.job writes it; that module imports Hydra, so it is not imported here
_ORDER = ("done", "skipped", "cut", "failed", "interrupted")


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

    from bnn_runner.cli.job import job
    from bnn_runner.config import told

    program = sys.argv[0]
    scratch = None if line.shows_only else make_scratch(anchor(checked.tree["output_dir"], Path.cwd()))
    own = [] if scratch is None else [f"hydra.{kind}.dir={quote(str(scratch))}" for kind in ("run", "sweep")]
    if scratch is not None and line.multirun:
        print(f"bnn-run: {checked.jobs} job{'s' if checked.jobs != 1 else ''}", file=sys.stderr, flush=True)
        os.environ["BNN_RUN_JOBS"] = str(checked.jobs)
    saved, sys.argv = sys.argv, [program, *arguments, *own]
    try:
        hydra.main(config_path=str(packaged_conf()), config_name="config", version_base="1.3")(job)()
        return report(scratch, checked, line.multirun) if scratch is not None else 0
    except (HydraException, OmegaConfBaseException) as error:
        raise UserError(told(error)) from error
    finally:
        sys.argv = saved
        os.environ.pop("BNN_RUN_JOBS", None)
        if scratch is not None:
            clear_scratch(scratch)


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
    """Remove what Hydra and we left there; a launcher's own logs stay."""
    for path in [scratch / "multirun.yaml", *scratch.glob(f"*/{_OUTCOME}"), scratch / _OUTCOME]:
        path.unlink(missing_ok=True)
    for folder in [*(p for p in scratch.glob("*") if p.is_dir()), scratch, scratch.parent]:
        with contextlib.suppress(OSError):  # not empty: not ours
            folder.rmdir()


def report(scratch: Path, checked: Checked, multirun: bool) -> int:
    """Sum up what the jobs left; returns the exit code. Files are read, not return values: jobs may run elsewhere."""
    outcomes = read_outcomes(scratch)
    if not multirun:
        outcome = outcomes[0] if outcomes else {"status": "failed", "message": "no result"}
        codes = {"done": OK, "skipped": OK, "mistake": MISTAKE, "interrupted": INTERRUPTED}
        if outcome["status"] in ("failed", "cut") and not outcome.get("told"):
            print(f"bnn-run: {outcome['status']}. {outcome['message']}", file=sys.stderr)
        return codes.get(outcome["status"], FAILED)
    missing = max(checked.jobs - len(outcomes), 0) if checked.jobs else 0
    counts: dict[str, int] = {}
    for outcome in outcomes:
        name = "failed" if outcome["status"] == "mistake" else outcome["status"]
        counts[name] = counts.get(name, 0) + 1
    counts = {name: counts[name] for name in sorted(counts, key=_ORDER.index)}
    if missing:
        counts["without a result"] = missing
    listed = ", ".join(f"{n} {name}" for name, n in counts.items())
    print(f"\nbnn-run: {checked.jobs} job{'s' if checked.jobs != 1 else ''}: {listed}", file=sys.stderr)
    bad = [o for o in outcomes if o["status"] not in ("done", "skipped")]
    for outcome in bad:
        status = "failed" if outcome["status"] == "mistake" else outcome["status"]
        reason = (outcome["message"].splitlines() or ["no reason given"])[0]
        print(f"  {status:<8} {outcome['overrides']}: {reason}", file=sys.stderr)
    if any(o["status"] == "interrupted" for o in bad):
        return INTERRUPTED
    if missing or any(o["status"] in ("failed", "cut") for o in bad):
        return FAILED
    return MISTAKE if bad else OK


def read_outcomes(scratch: Path) -> list[dict[str, Any]]:
    """The outcome each job wrote, in the order of the jobs."""
    files = [*scratch.glob(f"*/{_OUTCOME}"), scratch / _OUTCOME]
    found = [json.loads(path.read_text(encoding="utf-8")) for path in files if path.is_file()]
    return sorted(found, key=lambda outcome: int(outcome["number"]))
