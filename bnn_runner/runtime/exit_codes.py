"""Exit codes of the commands, and how they print errors."""

from __future__ import annotations

import sys
from collections.abc import Callable

from bnn_runner.errors import RunFailed, UserError
from bnn_runner.runtime.streams import output_lost

OK, FAILED, USAGE_ERROR, INTERRUPTED = 0, 1, 2, 130


def print_errors(error: UserError, consequence: str) -> None:
    """Prints every problem of `error`, numbered, to standard error.

    Args:
        error: Holds one or more problems.
        consequence: Ends the headline: 'nothing was run'.
    """
    count = len(error.problems)
    print(f"bnn-run: {count} error{'s' if count != 1 else ''}, {consequence}", file=sys.stderr)
    for number, problem in enumerate(error.problems, 1):
        print(f"  {number}. {problem}", file=sys.stderr)


def run_command(program: str, command: Callable[[], object]) -> int:
    """Runs a command that works on finished runs, and turns its errors into messages on standard error.

    Args:
        program: Name that starts every message: 'bnn-predict'.
        command: Does the work; its result is ignored.

    Returns:
        The exit code.
    """
    try:
        command()
    except UserError as error:
        for problem in error.problems:
            print(f"{program}: {problem}", file=sys.stderr)
        return USAGE_ERROR
    except RunFailed as error:
        print(f"{program}: {error}", file=sys.stderr)
        return FAILED
    except KeyboardInterrupt:
        print(f"{program}: interrupted.", file=sys.stderr)
        return INTERRUPTED
    return FAILED if output_lost() else OK
