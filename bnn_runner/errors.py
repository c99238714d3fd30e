"""Errors a user can cause, told as what, why and what to do. Imports nothing heavy."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Sequence


class UserError(Exception):
    """A mistake of the user's: shown as text with exit code 2, never as a traceback.

    Several mistakes travel together, so that all of them are shown at once.
    """

    def __init__(self, *problems: str) -> None:
        super().__init__("\n".join(problems))
        self.problems: tuple[str, ...] = problems


class RunFailed(Exception):
    """A run that cannot go on by itself (say, a non-finite loss): FAILED in its cell, exit code 1."""


class Interrupted(Exception):
    """The run was asked to stop (Ctrl-C, SIGTERM) and has left a state from which it goes on."""


def raise_all(problems: Sequence[str]) -> None:
    """Raise one `UserError` with every problem, if there are any."""
    if problems:
        raise UserError(*problems)


def did_you_mean(word: str, options: Iterable[str]) -> str:
    """' Did you mean X?' for the nearest of `options`, or an empty text."""
    near = difflib.get_close_matches(word, sorted(set(options)), n=3, cutoff=0.6)
    return f" Did you mean {' or '.join(near)}?" if near else ""
