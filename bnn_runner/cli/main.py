"""`bnn-run`: check the command line, then hand it to Hydra; each job becomes one call of `runner.run`.

Exit codes: 0 all well, 1 a run failed, 2 a user's mistake, 130 interrupted. Hydra and torch are
imported only after the command line has been checked.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

from bnn_runner._version import __version__
from bnn_runner.cli.flags import CommandLine, read_flags
from bnn_runner.config.overrides import defer, expand, render
from bnn_runner.config.validate import Checked, check
from bnn_runner.errors import UserError
from bnn_runner.runtime.exit_codes import FAILED, INTERRUPTED, OK, USAGE_ERROR, print_errors
from bnn_runner.runtime.files import unwritable


def main() -> None:
    """Entry point of `bnn-run`."""
    sys.exit(run(sys.argv[1:]))


def run(argv: Sequence[str]) -> int:
    """Run the command line; returns the exit code."""
    try:
        line = read_flags(argv)
        if line.version:
            print(f"bnn-run {__version__}")
            return OK
        if line.help:
            from bnn_runner.cli.help import help_text

            print(help_text(line.config_dirs))
            return OK
        checked = check(line.overrides, line.config_dirs, line.multirun)
        if checked.tree["plan_only"] and not line.multirun:
            raise UserError("plan_only=true shows the plan of a sweep, and this is one run. Add -m to see its plan.")
        if checked.tree["objective"] is not None and not line.multirun:
            raise UserError("objective=... is what a search goes by, and this is one run. Add -m hydra/sweeper=optuna.")
        from bnn_runner.cli.launch import launch

        return launch(hydra_arguments(line, checked), checked, line)
    except UserError as error:
        print_errors(error, "nothing was run")
        return USAGE_ERROR
    except KeyboardInterrupt:
        print("\nbnn-run: interrupted. The same command, typed again, goes on from what is finished.", file=sys.stderr)
        return INTERRUPTED
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return OK
    except OSError as error:
        if (reason := unwritable(error)) is None:
            raise
        print(f"bnn-run: {reason}", file=sys.stderr)
        return FAILED


def hydra_arguments(line: CommandLine, checked: Checked) -> list[str]:
    """Flags and overrides as Hydra shall see them."""
    if line.shows_only and not line.multirun:
        own = [o for o in checked.overrides if not o.key.startswith(("hydra.", "hydra/"))]
        rest = [render(o) for o in checked.overrides if o not in own]
        expanded, notes = expand([o.text for o in own], line.config_dirs)
        for note in notes:
            print(f"note: {note}", file=sys.stderr)
        return [*line.flags, *expanded, *rest]
    overrides = list(checked.overrides)
    brought = [o for o in overrides if o.text not in line.overrides]  # sweeps that an experiment file brings along
    extra = []
    if brought:
        if any(o.key == "hydra/sweeper" for o in overrides):
            overrides = [o for o in overrides if o not in brought]
        else:
            extra = ["hydra.sweeper.params=null"]
    return [*line.flags, *defer(overrides, checked.catalogue, checked.points), *extra]


if __name__ == "__main__":
    main()
