"""Fills in what the data set recommends for everything that the user did not set. Imports neither Hydra nor torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from bnn_runner.config.canonical import canonical
from bnn_runner.config.groups import BLOCKS, GLOBAL_GROUPS, RECOMMENDED, Catalogue, flatten, merge
from bnn_runner.config.overrides import Override, parse, render, to_text
from bnn_runner.config.where_rules import SMALL, settings_where
from bnn_runner.errors import UserError

FAMILY_DEFAULT = {"model": "mlp", "schedule": "adam", "prior": "isotropic", "hyper": "auto", "augment": "none"}
"""Choices for a data set that recommends nothing for the selected model."""


@dataclass(frozen=True)
class Resolved:
    """One point of a sweep, with the recommendations filled in.

    Attributes:
        typed: Group -> choice before, where a choice may be the placeholder `recommended`.
        choices: Group -> choice after.
        body: Keys that experiment files set.
        additions: The overrides that lead from `typed` to `choices` and set recommended values.
        notes: Lines for the user about them.
    """

    typed: dict[str, Any]
    choices: dict[str, Any]
    body: dict[str, Any]
    additions: tuple[str, ...]
    notes: tuple[str, ...] = field(default=())


def _names(choice: Any) -> list[str]:
    """Returns a group's choice as a list of names: [] for null, one name for a text."""
    if choice is None:
        return []
    return [str(c) for c in choice] if isinstance(choice, (list, tuple)) else [str(choice)]


def resolve(catalogue: Catalogue, parsed: Sequence[Override]) -> Resolved:
    """Fills in recommended choices and values at one point of a sweep.

    Precedence, highest first: `parsed`, the conditional settings of experiment files, their other keys, the
    recommendations of the data set.

    Args:
        catalogue: The groups and choices.
        parsed: Overrides without sweeps.

    Raises:
        UserError: If a choice is unknown, or the data set recommends a key that does not exist.
    """
    selected = {o.key: o.value for o in parsed if o.key in catalogue.groups and o.prefix != "~" and not o.package}
    typed = dict(catalogue.defaults)
    body: dict[str, Any] = {}
    rules: dict[str, Any] = {}
    for group in GLOBAL_GROUPS:
        for name in _names(selected.get(group, typed.get(group))):
            content = catalogue.load(group, name)
            typed |= catalogue.group_overrides(group, name)
            body = merge(body, {k: v for k, v in content.items() if k not in ("defaults", "hydra", "where")})
            rules |= content.get("where") or {}
    typed |= selected
    typed |= {o.key: None for o in parsed if o.prefix == "~" and o.key in catalogue.groups}
    values = {o.key: o.value for o in parsed if o.prefix != "~"}
    conditional = settings_where(rules, {"size": SMALL} | values | typed, values)
    typed |= {group: choice for group, choice in conditional.items() if group in catalogue.groups}

    recommendation, notes = _recommendation(catalogue, typed)
    choices, additions = dict(typed), [f"{key}={to_text(value)}" for key, value in conditional.items()]
    for group, recommended in recommendation["choices"].items():
        if typed.get(group) == RECOMMENDED:
            choices[group] = recommended
            additions.append(f"{group}={recommended}")
    if "metric" not in selected and not _names(typed.get("metric")):
        choices["metric"] = catalogue.choices("metric")
        additions.append(f"metric=[{','.join(choices['metric'])}]")

    set_keys = ({o.key for o in parsed} | set(conditional) | set(flatten(body))) - set(catalogue.groups)
    for key, value in recommendation["values"].items():
        group = key.split(".")[0]
        if any(key == s or key.startswith(f"{s}.") or s.startswith(f"{key}.") for s in set_keys):
            continue
        if group in recommendation["choices"] and choices.get(group) != recommendation["choices"][group]:
            continue
        if group in catalogue.groups and key.partition(".")[2] not in flatten(keys_of(catalogue, group, choices)):
            if group not in recommendation["choices"]:
                continue  # a recommendation for one method, say, does not concern the others
            raise UserError(
                f"data={typed['data']} recommends {key}, which is not a key of {group}={choices[group]}. Correct "
                "the block `recommended` in the data set's YAML file."
            )
        additions.append(f"{key}={to_text(value)}")
    additions += _debug_settings(catalogue, choices, {o.key for o in parsed} | set(conditional))
    return Resolved(typed, choices, body, tuple(additions), tuple(notes))


def _debug_settings(catalogue: Catalogue, choices: dict[str, Any], set_keys: set[str]) -> list[str]:
    """Overrides from the method's block `debug`, for runs with a choice of debug; without keys that are set."""
    method = choices.get("method")
    if not _names(choices.get("debug")) or method not in catalogue.groups.get("method", {}):
        return []
    settings = catalogue.load("method", str(method)).get(BLOCKS["method"]) or {}
    return [f"method.{key}={to_text(value)}" for key, value in settings.items() if f"method.{key}" not in set_keys]


def keys_of(catalogue: Catalogue, group: str, choices: dict[str, Any]) -> dict[str, Any]:
    """Returns the keys of a group's current choice as a nested dictionary, without blocks like `recommended`.

    For metrics the names of the choices are the first level.
    """
    names = [n for n in _names(choices.get(group)) if n in catalogue.groups.get(group, {})]
    if group == "metric":
        return {name: catalogue.load(group, name) for name in names}
    tree: dict[str, Any] = dict(catalogue.shared.get(group, {}))
    for name in names:
        tree = merge(tree, catalogue.load(group, name))
    tree.pop(BLOCKS.get(group, ""), None)
    return tree


def find(tree: dict[str, Any], dotted: str) -> tuple[Any, bool]:
    """Returns the value of a dotted key, and whether it exists."""
    value: Any = tree
    for part in dotted.split("."):
        if not isinstance(value, dict) or part not in value:
            # A key with the default null or {} may hold any keys; the later check against the class decides.
            return None, value is None or value == {}
        value = value[part]
    return value, True


def has_key(catalogue: Catalogue, key: str, choices: dict[str, Any]) -> bool:
    """Whether a dotted key exists with these choices; a user's own class may have any key."""
    group, _, rest = key.partition(".")
    if group not in catalogue.groups:
        return True
    return find(keys_of(catalogue, group, choices), rest)[1] or catalogue.is_open(group, choices.get(group))


def _recommendation(catalogue: Catalogue, typed: dict[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """Recommended `choices` and `values` for this data set with this model, and notes."""
    data = typed.get("data")
    block = catalogue.load("data", str(data)).get("recommended") or {} if data else {}
    main = {g: str(block.get(g) or default) for g, default in FAMILY_DEFAULT.items()}
    values = dict(block.get("values") or {})
    model = main["model"] if typed.get("model") == RECOMMENDED else typed.get("model")
    if block and model == main["model"]:
        return {"choices": main, "values": values}, []
    for_model = (block.get("for_model") or {}).get(model)
    if for_model is not None:
        choices = main | {g: str(for_model[g]) for g in FAMILY_DEFAULT if for_model.get(g)} | {"model": model}
        values = {
            k: v for k, v in values.items() if (g := k.split(".")[0]) != "model" and choices.get(g) == main.get(g)
        }
        return {"choices": choices, "values": values | dict(for_model.get("values") or {})}, []
    choices = FAMILY_DEFAULT | {"model": model}
    values = {k: v for k, v in values.items() if k.split(".")[0] not in FAMILY_DEFAULT}
    placeholders = [g for g in FAMILY_DEFAULT if typed.get(g) == RECOMMENDED]
    if not placeholders:
        return {"choices": choices, "values": values}, []
    filled = ", ".join(f"{g}={choices[g]}" for g in placeholders)
    return {"choices": choices, "values": values}, [
        f"data={data} has no recommendation for model={model}; using {filled} with their default values"
    ]


@dataclass(frozen=True)
class Expanded:
    """The command line of one run with all recommendations written out.

    Attributes:
        typed: The overrides as typed.
        overrides: All overrides for Hydra.
        choices: Group -> choice.
        notes: Lines for the user.
    """

    typed: list[str]
    overrides: list[str]
    choices: dict[str, Any]
    notes: list[str]


def expand(overrides: Sequence[str], config_dirs: Sequence[Path | str] = ()) -> Expanded:
    """Adds the data set's recommended choices and values, and all metrics if none is selected.

    `overrides` take precedence over recommendations. Expanding a second time changes nothing. A sweep is replaced by
    its first value.
    """
    catalogue = Catalogue(config_dirs)
    parsed, problems = canonical(catalogue, with_user_class([parse(text) for text in overrides]))
    if problems:
        raise UserError(*problems)
    point = resolve(catalogue, [o.single(o.values[0]) if o.sweep else o for o in parsed])
    return expanded_at(catalogue, parsed, point)


def expanded_at(catalogue: Catalogue, parsed: Sequence[Override], point: Resolved) -> Expanded:
    """Returns the overrides with those of an already resolved point added (see `expand`)."""
    left_out = [o for o in parsed if o.optional and not has_key(catalogue, o.key, point.choices)]
    applied = [replace(o, optional=False) for o in parsed if o not in left_out]
    plain = [render(_as_hydra_checks(catalogue, o, point.choices)) for o in applied]
    notes = [f"{o.text} has no effect: {_is_no_key(o.key, point.choices)}" for o in left_out]
    return Expanded([o.text for o in parsed], [*plain, *point.additions], dict(point.choices), [*point.notes, *notes])


def _is_no_key(key: str, choices: dict[str, Any]) -> str:
    group = key.partition(".")[0]
    return f"it is not a key of {group}={','.join(_names(choices.get(group))) or 'null'}"


def with_user_class(parsed: Sequence[Override]) -> list[Override]:
    """Adds model=module if the user typed their own class as model._target_=... and selected no model."""
    keys = {o.key for o in parsed}
    user_class = "model._target_" in keys and not keys & {"model", *GLOBAL_GROUPS}
    return [*([parse("model=module")] if user_class else []), *parsed]


def _as_hydra_checks(catalogue: Catalogue, override: Override, choices: dict[str, Any]) -> Override:
    """Removes an unnecessary '+' or '++', so that Hydra checks the key; adds '++' for keys of a user's own class."""
    group, _, rest = override.key.partition(".")
    in_choice = rest in flatten(keys_of(catalogue, group, choices))
    if override.prefix == "" and rest and not in_choice and catalogue.is_open(group, choices.get(group)):
        return replace(override, prefix="++")
    exists = override.key in catalogue.defaults or (override.prefix == "++" and in_choice)
    return replace(override, prefix="") if exists and override.prefix != "~" and not override.package else override


def defer(overrides: Sequence[Override], catalogue: Catalogue, points: Sequence[Resolved]) -> list[str]:
    """Returns overrides for Hydra's first composition, which happens before placeholders are filled in.

    Keys of a placeholder get the prefix '++', because they do not exist yet.
    """
    placeholders = {g for point in points for g, choice in point.typed.items() if choice == RECOMMENDED}
    deferred = []
    for override in overrides:
        group, _, rest = override.key.partition(".")
        missing = group in placeholders or any(catalogue.is_open(group, p.typed.get(group)) for p in points)
        missing |= group == "metric" and not _names(points[0].typed.get("metric"))
        if rest and missing and override.prefix == "":
            override = replace(override, prefix="++")
        elif override.prefix == "+" and override.key in catalogue.defaults:
            override = replace(override, prefix="")
        deferred.append(render(override))
    return deferred
