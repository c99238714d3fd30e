"""Overrides in one form: `null`, `none`, `[]` and `~group` for no choice, and glob(...) as the choices it matches.

Hydra itself refuses some of these forms, and reads others in different ways.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from fnmatch import fnmatchcase
from typing import Any

from bnn_runner.config.groups import GLOBAL_GROUPS, RECOMMENDED, Catalogue
from bnn_runner.config.overrides import Override, glob_patterns, to_text
from bnn_runner.errors import UserError, did_you_mean

_NOTHING = (None, "", "none", "null", "None")


def canonical(catalogue: Catalogue, parsed: Sequence[Override]) -> tuple[list[Override], list[str]]:
    """Returns the overrides in one form, and problems; an override with a problem is left out."""
    found: list[Override] = []
    problems: list[str] = []
    for override in parsed:
        try:
            if override.key in catalogue.groups and not override.package:
                override = _without_choice(catalogue, _expanded_glob(catalogue, override))
            if override.sweep and not override.values:
                raise UserError(f"{override.text} has no values, so there is nothing to run. Give at least one.")
            found.append(override)
        except UserError as error:
            problems += error.problems
    return found, problems


def _without_choice(catalogue: Catalogue, override: Override) -> Override:
    """The override with one form of "no choice" (~experiment, metric=[], logger=none); unchanged for other values."""
    group = override.key
    has_none = "none" in catalogue.groups[group]
    if group not in (*GLOBAL_GROUPS, "metric") and not has_none:
        return override
    if override.prefix == "~":
        if override.raw is not None and override.value not in _NOTHING and override.value != []:
            kept = f"{group}=[a,b] with the choices to keep" if group == "metric" else f"~{group}"
            raise UserError(f"{override.text}: only a whole group can be removed. Write {kept}.")
        return _set(override, "none") if has_none else _set(override, []) if group == "metric" else override
    nothing: Any = "none" if has_none else [] if group == "metric" else None
    values = tuple(nothing if _is_nothing(v) else v for v in override.values)
    if values == override.values and not (group in GLOBAL_GROUPS and values == (None,)):
        return override
    if override.sweep:
        return replace(override, values=values, raw=",".join(map(to_text, values)))
    if group in GLOBAL_GROUPS:
        return replace(override, prefix="~", raw=None, values=())
    return _set(override, nothing)


def _is_nothing(value: Any) -> bool:
    return value == [] if isinstance(value, (list, dict)) else value in _NOTHING


def _set(override: Override, value: Any) -> Override:
    return replace(override, prefix="", raw=to_text(value), values=(value,), sweep=False)


def _expanded_glob(catalogue: Catalogue, override: Override) -> Override:
    """`method=glob(laplace_k*)` as a sweep over the choices that match. Raises `UserError` if there are none."""
    patterns = glob_patterns(override.raw or "")
    if patterns is None:
        return override
    include, exclude = patterns
    names = [n for n in catalogue.choices(override.key) if n != RECOMMENDED]
    matches = [n for n in names if _matches(n, include) and not _matches(n, exclude)]
    if not matches:
        words = [w for p in include if (w := re.sub(r"[*?\[\]]", "", p))]
        near = next((hint for w in words if (hint := did_you_mean(w, names))), "")
        raise UserError(
            f"{override.text} matches no choice of {override.key}.{near} Choices of {override.key}: {', '.join(names)}."
        )
    return replace(override, raw=f"choice({','.join(matches)})", values=tuple(matches), sweep=True)


def _matches(name: str, patterns: Sequence[str]) -> bool:
    return any(fnmatchcase(name, pattern) for pattern in patterns)
