"""`bnn-run`: checks the command line, then runs it; a sweep runs through Hydra.

Exit codes: 0 success, 1 a run failed, 2 usage error, 130 interrupted. Hydra and torch are imported only after the
command line has been checked.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from bnn_runner._version import __version__
from bnn_runner.cli.flags import CommandLine, read_flags
from bnn_runner.config.recommend import defer
from bnn_runner.config.validate import Checked, check
from bnn_runner.errors import UserError, raise_all
from bnn_runner.runtime.exit_codes import FAILED, INTERRUPTED, OK, USAGE_ERROR, print_errors
from bnn_runner.runtime.files import explain_write_error
from bnn_runner.runtime.streams import accept_every_text


def main() -> None:
    """Entry point of `bnn-run`."""
    accept_every_text()
    sys.exit(run(sys.argv[1:]))


def run(argv: Sequence[str]) -> int:
    """Runs a command line. Returns the exit code."""
    try:
        line = read_flags(argv)
        if line.version:
            print(f"bnn-run {__version__}")
            return OK
        if line.help:
            from bnn_runner.cli.help import help_text

            print(help_text(line.config_dirs, line.topic))
            return OK
        if line.for_hydra:
            from bnn_runner.cli import launch

            return launch.show(line.flags)
        checked = check(line.overrides, line.config_dirs, line.multirun)
        if not (line.multirun or line.shows_only):
            raise_all(_without_multirun(checked))
        from bnn_runner.cli import launch

        if line.multirun:
            arguments = [*line.flags, *sweep_arguments(line, checked)]
            return launch.show(arguments) if line.shows_only else launch.sweep(arguments, checked)
        expanded = checked.expanded()
        arguments = [*line.flags, *expanded.overrides]
        if not line.shows_only:
            return launch.run_once(arguments, expanded, checked, line)
        for note in expanded.notes:
            print(f"note: {note}", file=sys.stderr)
        return launch.show(arguments)
    except UserError as error:
        print_errors(error, "nothing was run")
        return USAGE_ERROR
    except KeyboardInterrupt:
        print("\nbnn-run: interrupted. Run the same command again to resume.", file=sys.stderr)
        return INTERRUPTED
    except OSError as error:
        if (reason := explain_write_error(error)) is None:
            raise
        print(f"bnn-run: {reason}", file=sys.stderr)
        return FAILED


def _without_multirun(checked: Checked) -> list[str]:
    """Problems of settings that only a sweep uses, on a command line without -m."""
    problems = []
    if checked.tree["plan_only"]:
        problems.append("plan_only=true requires a sweep: it prints the sweep's plan. Add -m.")
    if checked.tree["objective"] is not None:
        problems.append("objective=... requires a search. Add -m hydra/sweeper=optuna.")
    for override in checked.overrides:
        if override.key.replace("/", ".").startswith(("hydra.launcher", "hydra.sweeper")):
            problems.append(
                f"{override.text} requires -m: without it, the run would start here and now. Add -m (one run is a "
                "sweep of one job), or remove the setting."
            )
    return problems


def sweep_arguments(line: CommandLine, checked: Checked) -> list[str]:
    """Returns the overrides of a sweep for Hydra."""
    overrides = list(checked.overrides)
    from_experiments = [o for o in overrides if o.text not in line.overrides]  # the sweeps in experiment files
    extra = []
    if from_experiments:
        if any(o.key == "hydra/sweeper" for o in overrides):
            overrides = [o for o in overrides if o not in from_experiments]
        else:
            extra = ["hydra.sweeper.params=null"]
    return [*defer(overrides, checked.catalogue, checked.points), *extra]


if __name__ == "__main__":
    main()
