"""What the data set recommends, filled in for what nobody chose. Imports neither Hydra nor torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from bnn_runner.config.groups import BLOCKS, GLOBAL_GROUPS, RECOMMENDED, Catalogue, flatten, merge
from bnn_runner.config.overrides import Override, parse, render, to_text
from bnn_runner.config.where_rules import SMALL, settings_where
from bnn_runner.errors import UserError

FAMILY_DEFAULT = {"model": "mlp", "schedule": "adam", "prior": "isotropic", "hyper": "evidence", "augment": "none"}
"""What is taken where a data set recommends nothing for the model at hand."""


@dataclass(frozen=True)
class Resolved:
    """One point of a sweep with `recommended` filled in.

    `typed` are the choices before, `choices` after; `body` is what experiment files set; `additions` are the
    overrides that lead from one to the other, `notes` what a person should know about them.
    """

    typed: dict[str, Any]
    choices: dict[str, Any]
    body: dict[str, Any]
    additions: tuple[str, ...]
    notes: tuple[str, ...] = field(default=())


def _names(choice: Any) -> list[str]:
    """A group's choice as a list of names ([] for null, one for a text)."""
    if choice is None:
        return []
    return [str(c) for c in choice] if isinstance(choice, (list, tuple)) else [str(choice)]


def resolve(catalogue: Catalogue, parsed: Sequence[Override]) -> Resolved:
    """Choices and recommended settings at one point (no sweeps in `parsed`). Raises `UserError` for unknown choices."""
    picked = {o.key: o.value for o in parsed if o.key in catalogue.groups and o.prefix != "~" and not o.package}
    typed = dict(catalogue.defaults)
    body: dict[str, Any] = {}
    rules: dict[str, Any] = {}
    for group in GLOBAL_GROUPS:
        for name in _names(picked.get(group, typed.get(group))):
            content = catalogue.load(group, name)
            typed |= catalogue.group_overrides(group, name)
            body = merge(body, {k: v for k, v in content.items() if k not in ("defaults", "hydra", "where")})
            rules |= content.get("where") or {}
    typed |= picked
    typed |= {o.key: None for o in parsed if o.prefix == "~" and o.key in catalogue.groups}
    told = {o.key: o.value for o in parsed if o.prefix != "~"}
    wanted = settings_where(rules, {"size": SMALL} | told | typed, told)
    typed |= {group: choice for group, choice in wanted.items() if group in catalogue.groups}

    pair, notes = _pair(catalogue, typed)
    choices, additions = dict(typed), [f"{key}={to_text(value)}" for key, value in wanted.items()]
    for group, recommended in pair["choices"].items():
        if typed.get(group) == RECOMMENDED:
            choices[group] = recommended
            additions.append(f"{group}={recommended}")
    if "metric" not in picked and not _names(typed.get("metric")):
        choices["metric"] = catalogue.choices("metric")
        additions.append(f"metric=[{','.join(choices['metric'])}]")

    taken = {o.key for o in parsed} | set(wanted) | set(flatten(body))
    for key, value in pair["values"].items():
        group = key.split(".")[0]
        if any(key == t or key.startswith(f"{t}.") or t.startswith(f"{key}.") for t in taken - set(catalogue.groups)):
            continue
        if group in pair["choices"] and choices.get(group) != pair["choices"][group]:
            continue
        if group in catalogue.groups and key.partition(".")[2] not in flatten(keys_of(catalogue, group, choices)):
            if group not in pair["choices"]:
                continue  # a wish about, say, one method does not concern the others
            raise UserError(
                f"data={typed['data']} recommends {key}, which is not a key of {group}={choices[group]}. Correct "
                "the recommended block of the data set's YAML file."
            )
        additions.append(f"{key}={to_text(value)}")
    additions += _for_debug(catalogue, choices, {o.key for o in parsed} | set(wanted))
    return Resolved(typed, choices, body, tuple(additions), tuple(notes))


def _for_debug(catalogue: Catalogue, choices: dict[str, Any], taken: set[str]) -> list[str]:
    """The settings that the method's file has for a run under a choice of debug; what is typed wins."""
    method = choices.get("method")
    if not _names(choices.get("debug")) or method not in catalogue.groups.get("method", {}):
        return []
    smaller = catalogue.load("method", str(method)).get(BLOCKS["method"]) or {}
    return [f"method.{key}={to_text(value)}" for key, value in smaller.items() if f"method.{key}" not in taken]


def keys_of(catalogue: Catalogue, group: str, choices: dict[str, Any]) -> dict[str, Any]:
    """The tree of keys below `group.` for its present choice; metrics stand below their names."""
    names = [n for n in _names(choices.get(group)) if n in catalogue.groups.get(group, {})]
    if group == "metric":
        return {name: catalogue.load(group, name) for name in names}
    tree: dict[str, Any] = dict(catalogue.shared.get(group, {}))
    for name in names:
        tree = merge(tree, catalogue.load(group, name))
    tree.pop(BLOCKS.get(group, ""), None)
    return tree


def _pair(catalogue: Catalogue, typed: dict[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """Recommended choices and values for this data set with this model."""
    data = typed.get("data")
    block = catalogue.load("data", str(data)).get("recommended") or {} if data else {}
    own = {g: str(block.get(g) or default) for g, default in FAMILY_DEFAULT.items()}
    values = dict(block.get("values") or {})
    model = own["model"] if typed.get("model") == RECOMMENDED else typed.get("model")
    if block and model == own["model"]:
        return {"choices": own, "values": values}, []
    other = (block.get("for_model") or {}).get(model)
    if other is not None:
        choices = own | {g: str(other[g]) for g in FAMILY_DEFAULT if other.get(g)} | {"model": model}
        kept = {k: v for k, v in values.items() if (g := k.split(".")[0]) != "model" and choices.get(g) == own.get(g)}
        return {"choices": choices, "values": kept | dict(other.get("values") or {})}, []
    choices = FAMILY_DEFAULT | {"model": model}
    kept = {k: v for k, v in values.items() if k.split(".")[0] not in FAMILY_DEFAULT}
    open_groups = [g for g in FAMILY_DEFAULT if typed.get(g) == RECOMMENDED]
    if not open_groups:
        return {"choices": choices, "values": kept}, []
    filled = ", ".join(f"{g}={choices[g]}" for g in open_groups)
    return {"choices": choices, "values": kept}, [
        f"data={data} has no recommendation for model={model}; using {filled} with their default values"
    ]


@dataclass(frozen=True)
class Expanded:
    """One run's command line with everything recommended written out.

    `typed` is what was typed, `overrides` the whole, `choices` each group's choice; `notes` are for a person.
    """

    typed: list[str]
    overrides: list[str]
    choices: dict[str, Any]
    notes: list[str]


def expand(overrides: Sequence[str], config_dirs: Sequence[Path | str] = ()) -> Expanded:
    """Fill in the data set's recommended choices and values, and every metric where none is chosen.

    What is in `overrides` always wins; expanding twice changes nothing. Of a sweep the first values are taken.
    """
    catalogue = Catalogue(config_dirs)
    parsed = with_own_class([parse(text) for text in overrides])
    point = resolve(catalogue, [o.single(o.values[0]) if o.sweep else o for o in parsed])
    return expanded_at(catalogue, parsed, point)


def expanded_at(catalogue: Catalogue, parsed: Sequence[Override], point: Resolved) -> Expanded:
    """The overrides in full, at a point where the choices are resolved already."""
    plain = [render(_as_hydra_checks(catalogue, o, point.choices)) for o in parsed]
    return Expanded([o.text for o in parsed], [*plain, *point.additions], dict(point.choices), list(point.notes))


def with_own_class(parsed: Sequence[Override]) -> list[Override]:
    """A class of the user's own, typed as model._target_=..., stands under model=module unless a model is chosen."""
    keys = {o.key for o in parsed}
    own = "model._target_" in keys and not keys & {"model", *GLOBAL_GROUPS}
    return [*([parse("model=module")] if own else []), *parsed]


def _as_hydra_checks(catalogue: Catalogue, override: Override, choices: dict[str, Any]) -> Override:
    """Drop a '+' or '++' that is not needed, so that Hydra checks the key; add it for keys of a user's own class."""
    group, _, rest = override.key.partition(".")
    here = rest in flatten(keys_of(catalogue, group, choices))
    if override.prefix == "" and rest and not here and catalogue.is_open(group, choices.get(group)):
        return replace(override, prefix="++")
    exists = override.key in catalogue.defaults or (override.prefix == "++" and here)
    return replace(override, prefix="") if exists and override.prefix != "~" and not override.package else override


def defer(overrides: Sequence[Override], catalogue: Catalogue, points: Sequence[Resolved]) -> list[str]:
    """Overrides of a placeholder's keys as '++', since Hydra composes before the placeholder is filled in."""
    open_groups = {g for point in points for g, choice in point.typed.items() if choice == RECOMMENDED}
    deferred = []
    for override in overrides:
        group, _, rest = override.key.partition(".")
        unfilled = group in open_groups or any(catalogue.is_open(group, p.typed.get(group)) for p in points)
        unfilled |= group == "metric" and not _names(points[0].typed.get("metric"))
        if rest and unfilled and override.prefix == "":
            override = replace(override, prefix="++")
        elif override.prefix == "+" and override.key in catalogue.defaults:
            override = replace(override, prefix="")
        deferred.append(render(override))
    return deferred
