"""Paths in tables: as much of them as distinguishes rows, and none of the folders of a machine."""

from __future__ import annotations

import re
from collections.abc import Sequence

_ABSOLUTE = re.compile(r"(?:(?<=^)|(?<=[\s=('\"\[,:]))(?:[A-Za-z]:[\\/]|/)(?:[^\s/\\'\"(),:;\]]+[\\/])+(?=[^\s/\\])")


def short_paths(texts: Sequence[str]) -> list[str]:
    """Returns absolute paths by their last parts, as many as keep different paths different; other texts unchanged."""
    paths = {text for text in texts if re.match(r"(?:[A-Za-z]:[\\/]|/)[^\s]", text)}
    short = {path: _tail(path, 1) for path in paths}
    longest = max((len(re.split(r"[\\/]+", path)) for path in paths), default=1)
    for count in range(2, longest + 1):
        names = list(short.values())
        clashing = {path for path in paths if names.count(short[path]) > 1}
        short |= {path: _tail(path, count) for path in clashing}
    return [short.get(text, text) for text in texts]


def _tail(path: str, count: int) -> str:
    return "/".join([part for part in re.split(r"[\\/]+", path) if part][-count:])


def without_folders(text: str) -> str:
    """Returns a sentence with the file names of absolute paths instead of the whole paths."""
    return _ABSOLUTE.sub("", text)
