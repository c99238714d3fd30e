"""Exceptions that end a run with a message: what, why and what to do. Imports nothing heavy."""

from __future__ import annotations

import difflib
import re
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
    near = close_matches(word, options)
    return f" Did you mean {' or '.join(near)}?" if near else ""


def close_matches(word: str, options: Iterable[str], cutoff: float = 0.6) -> list[str]:
    """Returns up to three of `options` that are close to `word`, the closest first.

    Capitals, hyphens, underscores and spaces do not count: an option that differs only in these is the only one.
    """
    names: dict[str, list[str]] = {}
    for option in sorted(set(options)):
        names.setdefault(_letters(option), []).append(option)
    plain = _letters(word)
    if plain in names:
        return names[plain][:3]
    near = difflib.get_close_matches(plain, sorted(names), n=3, cutoff=cutoff)
    return [option for name in near for option in names[name]][:3]


def _letters(text: str) -> str:
    return re.sub(r"[-_\s]", "", text.lower())
