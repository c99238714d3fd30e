"""Settings as a user can type them: quoted for Hydra and for the shell."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from typing import Any

from bnn_runner.config.overrides import to_text


def typed(key: str, value: Any) -> str:
    """A setting as a word of a command line.

    >>> print(typed("data.drop", ["when taken", "größe"]), typed("data.missing", "drop"))
    'data.drop=["when taken","größe"]' data.missing=drop
    """
    return shlex.quote(f"{key}={to_text(value)}")


def typed_columns(key: str, names: Sequence[str], all_names: Sequence[str]) -> str:
    """A list of columns as a word of a command line.

    A name that Hydra would read as something else (it has a $, a backslash, a quote or a line break) is given by its
    position, counted from 1.
    """
    odd = set("$\\\"'\n\r\t")
    words = [all_names.index(name) + 1 if odd & set(name) or name != name.strip() else name for name in names]
    return typed(key, words)
