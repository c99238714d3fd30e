"""Exit codes of the commands, and how a user's mistakes are told."""

from __future__ import annotations

import sys

from bnn_runner.errors import UserError

OK, FAILED, MISTAKE, INTERRUPTED = 0, 1, 2, 130


def tell_mistakes(error: UserError, consequence: str) -> None:
    """Print every problem, numbered, on standard error."""
    count = len(error.problems)
    print(f"bnn-run: {count} mistake{'s' if count != 1 else ''}, {consequence}", file=sys.stderr)
    for number, problem in enumerate(error.problems, 1):
        print(f"  {number}. {problem}", file=sys.stderr)
