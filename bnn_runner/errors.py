"""Exceptions that end a run with a message: what, why and what to do. Imports nothing heavy."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Sequence


class UserError(Exception):
    """A usage error: shown as text with exit code 2, never as a traceback.

    Args:
        *problems: One message each, so that all errors are shown at once.
    """

    def __init__(self, *problems: str) -> None:
        super().__init__("\n".join(problems))
        self.problems: tuple[str, ...] = problems


class RunFailed(Exception):
    """The run could not finish (for example, a non-finite loss): its cell is marked FAILED, exit code 1."""


class Interrupted(Exception):
    """A stop was requested (Ctrl-C, SIGTERM); the run saved a state from which it can resume."""


def raise_all(problems: Sequence[str]) -> None:
    """Raises one `UserError` with all problems, if there are any."""
    if problems:
        raise UserError(*problems)


def did_you_mean(word: str, options: Iterable[str]) -> str:
    """Returns ' Did you mean X?' with the closest of `options`, or an empty string if none is close."""
    near = difflib.get_close_matches(word, sorted(set(options)), n=3, cutoff=0.6)
    return f" Did you mean {' or '.join(near)}?" if near else ""
