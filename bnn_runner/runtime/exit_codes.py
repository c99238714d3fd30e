"""Exit codes of the commands, and how a user's mistakes are told."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable

from bnn_runner.errors import RunFailed, UserError

OK, FAILED, USAGE_ERROR, INTERRUPTED = 0, 1, 2, 130


def print_errors(error: UserError, consequence: str) -> None:
    """Print every problem, numbered, on standard error."""
    count = len(error.problems)
    print(f"bnn-run: {count} error{'s' if count != 1 else ''}, {consequence}", file=sys.stderr)
    for number, problem in enumerate(error.problems, 1):
        print(f"  {number}. {problem}", file=sys.stderr)


def guarded(program: str, work: Callable[[], object]) -> int:
    """Do the work of a command on a finished run; its exit code, with the reason on standard error where it fails."""
    try:
        work()
    except UserError as error:
        for problem in error.problems:
            print(f"{program}: {problem}", file=sys.stderr)
        return USAGE_ERROR
    except RunFailed as error:
        print(f"{program}: {error}", file=sys.stderr)
        return FAILED
    except KeyboardInterrupt:
        print(f"{program}: interrupted", file=sys.stderr)
        return INTERRUPTED
    except BrokenPipeError:  # `... | head`: nobody reads on
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return OK
