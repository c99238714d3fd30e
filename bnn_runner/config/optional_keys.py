"""`key?=value`: a value for the runs that have the key, as in a sweep over methods of which only some have it.

    bnn-run -m method=map,laplace 'method.structure?=kfac'

A key that no choice of its group has is an error. Jobs of a sweep that differ only in keys they lack are one job.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from bnn_runner.config.groups import Catalogue
from bnn_runner.config.overrides import Override, parse
from bnn_runner.config.recommend import Resolved, has_key, resolve, with_user_class
from bnn_runner.errors import UserError


def exists_at(catalogue: Catalogue, override: Override, points: Sequence[Resolved]) -> list[Resolved]:
    """Returns the points at which the key of an override exists."""
    return [point for point in points if has_key(catalogue, override.key, point.choices)]


def without_mark(catalogue: Catalogue, override: Override, points: Sequence[Resolved]) -> Override:
    """Returns an ordinary override instead of an optional one if its key exists at every point."""
    everywhere = override.optional and len(exists_at(catalogue, override, points)) == len(points)
    return replace(override, optional=False) if everywhere else override


def without_missing_keys(catalogue: Catalogue, overrides: Sequence[str]) -> list[str]:
    """Returns the overrides of one job, with optional ones set where their key exists and left out elsewhere."""
    parsed = [parse(text) for text in overrides]
    if not any(o.optional for o in parsed):
        return list(overrides)
    try:
        choices = resolve(catalogue, with_user_class(parsed)).choices
    except UserError:  # reported with the job's other problems
        return list(overrides)
    kept = [(o, text) for o, text in zip(parsed, overrides, strict=True)]
    return [
        f"{o.key}={o.raw}" if o.optional else text
        for o, text in kept
        if not o.optional or has_key(catalogue, o.key, choices)
    ]
