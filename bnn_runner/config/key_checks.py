"""The check of overrides `group.key=value`: does the key exist, has the value its type, and if not, what to type."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bnn_runner.config.groups import Catalogue, flatten
from bnn_runner.config.optional_keys import exists_at
from bnn_runner.config.other_programs import pointer
from bnn_runner.config.overrides import UNKNOWN, Override, command_line, quote
from bnn_runner.config.recommend import Resolved, find, keys_of
from bnn_runner.config.schema import show
from bnn_runner.config.settings import COMPONENTS
from bnn_runner.errors import did_you_mean


def key_problems(catalogue: Catalogue, override: Override, points: Sequence[Resolved]) -> list[str]:
    """Problems of a key that does not exist at every point, or whose value does not have the type of its default."""
    key = override.key
    group, _, rest = key.partition(".")
    if override.prefix == "~":
        return [f"{override.text} removes a required key. Set it to another value instead."]
    if override.package and key not in catalogue.groups:
        return [f"{override.text}: only groups take a package (@). Groups: {', '.join(catalogue.groups)}."]
    if group not in catalogue.groups:
        tree = catalogue.base
        if isinstance(tree.get(key), dict) and override.value is None:
            return [f"{key} must be a mapping {{key:value}}; got null. Remove it, or set single keys: {key}.NAME=...."]
        if key in tree or key in flatten(tree):
            return []
        return [unknown_key(catalogue, key, points)]
    if not rest:
        return []
    if override.optional and not _holders(catalogue, group, rest) and not exists_at(catalogue, override, points):
        return [unknown_key(catalogue, key, points)]
    problems = []
    for point in points:
        leaves = keys_of(catalogue, group, point.choices)
        default, exists = find(leaves, rest)
        if exists:
            problems += _type_problem(override, default)
        elif not (override.prefix or override.optional) and not catalogue.is_open(group, point.choices.get(group)):
            problems.append(unknown_key(catalogue, key, [point]))
    if override.prefix == "+" and points and all(find(keys_of(catalogue, group, p.choices), rest)[1] for p in points):
        problems.append(f"{override.text} adds a key that exists already. Remove the '+'.")
    return list(dict.fromkeys(problems))


def is_key_of_some(catalogue: Catalogue, override: Override, points: Sequence[Resolved]) -> bool:
    """Whether a plain `key=value` fails only because some of the swept choices have no such key."""
    plain = override.key.partition(".")[0] in catalogue.groups and not (override.prefix or override.optional)
    return plain and 0 < len(exists_at(catalogue, override, points)) < len(points)


def where_it_exists(
    only_some: Sequence[Override], parsed: Sequence[Override], config_dirs: Sequence[Path | str], multirun: bool
) -> str:
    """The command that sets these keys only where they exist."""
    texts = {o.text: f"{o.key}?={o.raw}" for o in only_some}
    folder = config_dirs[0] if config_dirs else None
    command = command_line([texts.get(o.text, o.text) for o in parsed], folder, multirun)
    return f"To set {' and '.join(o.key for o in only_some)} only where it exists, write ?= for =: {command}"


def _holders(catalogue: Catalogue, group: str, rest: str) -> list[str]:
    """The choices of a group that have a key."""
    return [c for c in catalogue.choices(group) if find(keys_of(catalogue, group, _only(group, c)), rest)[1]]


def _only(group: str, choice: str) -> dict[str, Any]:
    return {group: [choice] if group == "metric" else choice}


def unknown_key(catalogue: Catalogue, key: str, points: Sequence[Resolved]) -> str:
    """Returns the message for a key that does not exist: the closest keys, and the choices that have it."""
    group, _, rest = key.partition(".")
    known = list(flatten(catalogue.base))
    for point in points:
        for g in COMPONENTS:
            known += [f"{g}.{k}" for k in flatten(keys_of(catalogue, g, point.choices)) if not k.endswith("_target_")]
    known = list(dict.fromkeys(known))
    if elsewhere := pointer(key):
        return f"{key} is not a key.{elsewhere}"
    same_group = [k for k in known if k.startswith(f"{group}.")]
    near = did_you_mean(key, same_group) or did_you_mean(key, {*known, *catalogue.defaults, *catalogue.groups})
    if not near:
        same_name = [k for k in known if k.rpartition(".")[2] == key.rpartition(".")[2]]
        near = f" Did you mean {' or '.join(same_name[:3])}?" if same_name else ""
    if group in catalogue.groups and points:
        choice = points[0].choices.get(group)
        text = f"{key} is not a key of {group}={show(choice)}."
        others = [c for c in catalogue.choices(group) if c != choice]
        holders = [c for c in others if rest in flatten(keys_of(catalogue, group, {group: c}))]
        if holders and group != "metric":
            return f"{text} It is a key of {group}={', '.join(holders)}."
        if not near and group != "metric":
            every = {k for c in others for k in flatten(keys_of(catalogue, group, {group: c}))}
            near = did_you_mean(key, {f"{group}.{k}" for k in every})
        listed = f" Keys of {group}={show(choice)}: {', '.join(same_group) or 'none'}." if group != "metric" else ""
        return text + (near or listed)
    return f"{key} is not a key.{near}" + ("" if near else " See bnn-run --help.")


def _type_problem(override: Override, default: Any) -> list[str]:
    """Problems of values whose type differs from the YAML default's; a null default or value is not checked."""
    problems = []
    for value in override.values:
        if value is UNKNOWN or value is None or default is None:
            continue
        expected = hint = ""
        if isinstance(default, bool):
            expected = "" if isinstance(value, bool) else "true or false"
        elif isinstance(default, (int, float)):
            fits = isinstance(value, (int, float)) and not isinstance(value, bool)
            fits = fits or value == "auto"
            expected = "" if fits else "a whole number" if isinstance(default, int) else "a number"
        elif isinstance(default, list):
            expected = "" if isinstance(value, list) else "a list"
            hint = f" Write {override.key}=[{show(value)}]."
        elif isinstance(default, dict):
            expected = "" if isinstance(value, dict) else "a mapping {key:value}"
        elif isinstance(default, str) and default != "auto" and not isinstance(value, str):
            expected = "text"
            hint = f" Quote it twice to pass it as text: '{override.key}={quote(show(value))}'."
        if expected:
            problems.append(f"{override.key} must be {expected} (default {show(default)}); got {show(value)}.{hint}")
    return problems
