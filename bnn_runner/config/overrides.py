"""Command-line overrides: Hydra's `key=value` language read by ourselves, and `recommended` filled in.

Imports neither Hydra nor torch. `parse` understands what people type; `expand` replaces the
placeholder choices by what the data set recommends.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from bnn_runner.config.groups import BLOCKS, GLOBAL_GROUPS, RECOMMENDED, Catalogue, flatten, merge
from bnn_runner.config.where_rules import SMALL, settings_where
from bnn_runner.errors import UserError

FAMILY_DEFAULT = {"model": "mlp", "schedule": "adam", "prior": "isotropic", "hyper": "evidence", "augment": "none"}
"""What is taken where a data set recommends nothing for the model at hand."""


class _Unknown:
    """A value that only Hydra can work out (an interpolation, a function)."""

    def __repr__(self) -> str:
        return "<unknown>"


UNKNOWN = _Unknown()


@dataclass(frozen=True)
class Override:
    """One `[+|++|~]key[@package][=value]`. Several `values` are a sweep; UNKNOWN is what only Hydra can tell."""

    text: str
    prefix: str
    key: str
    package: str
    raw: str | None
    values: tuple[Any, ...]
    sweep: bool

    @property
    def value(self) -> Any:
        return self.values[0] if self.values else None

    def single(self, value: Any) -> Override:
        """The same override with one of its swept values."""
        return replace(self, values=(value,), sweep=False, raw=to_text(value))


_OVERRIDE = re.compile(
    r"(?P<prefix>\+\+|\+|~|)(?P<key>[^=@+~\s]+)(?:@(?P<package>[^=\s]*))?(?:=(?P<raw>.*))?", re.DOTALL
)
_UNQUOTED = re.compile(r"(?:[A-Za-z0-9_/\-+.$%*@?|:\s]|\\.)*")
_PLAIN = re.compile(r"[A-Za-z_/.][A-Za-z0-9_/.\-]*")
_INT = re.compile(r"[+-]?(?:0|[1-9]\d*(?:_\d+)*)")
_FLOAT = re.compile(r"[+-]?(?:\d[\d_]*\.[\d_]*|\.\d[\d_]*|\d[\d_]*(?=e))(?:e[+-]?\d+)?|[+-]?(?:inf|nan)", re.IGNORECASE)
_FUNCTION = re.compile(r"([A-Za-z_]\w*)\((.*)\)", re.DOTALL)
_SWEEPS = {"choice", "range", "interval", "glob"}
_CASTS = {"int", "float", "str", "bool", "json_str", "extend_list", "list", "dict"}
_FUNCTIONS = _SWEEPS | _CASTS | {"sort", "shuffle", "tag"}
_CLOSING = {"[": "]", "{": "}", "(": ")"}


def parse(text: str) -> Override:
    """Read one override. Raises `UserError` that says what to type instead."""
    match = _OVERRIDE.fullmatch(text)
    if match is None or (match["raw"] is None and match["prefix"] != "~"):
        raise UserError(f"{text!r} is not an override. Overrides look like key=value, without spaces around the '='.")
    raw = match["raw"]
    key = match["key"]
    if raw is None:
        return Override(text, match["prefix"], key, match["package"] or "", None, (), False)
    if raw.startswith("~/") or raw == "~":  # Hydra's grammar has no bare ~
        raw = quote(raw)
    try:
        values, sweep = _parse_values(raw)
    except ValueError as error:
        raise UserError(
            f"{text!r} cannot be read: {error}. Quote the value twice, for the shell and for Hydra: "
            f"'{match['prefix']}{key}={quote(match['raw'].strip(chr(39) + chr(34)))}'."
        ) from None
    return Override(text, match["prefix"], key, match["package"] or "", raw, values, sweep)


def render(override: Override) -> str:
    """The override as Hydra should read it."""
    at = f"@{override.package}" if override.package else ""
    tail = "" if override.raw is None else f"={override.raw}"
    return f"{override.prefix}{override.key}{at}{tail}"


def quote(text: str) -> str:
    """`text` in the double quotes of Hydra's grammar."""
    return '"' + re.sub(r'(\\*)"', r'\1\1\\"', text) + '"'


def to_text(value: Any) -> str:
    """A value in Hydra's override grammar."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, (int, float)):
        return repr(value)
    if isinstance(value, (list, tuple)):
        return "[" + ",".join(map(to_text, value)) + "]"
    if isinstance(value, dict):
        return "{" + ",".join(f"{k}:{to_text(v)}" for k, v in value.items()) + "}"
    text = str(value)
    plain = _PLAIN.fullmatch(text) and text.lower() not in ("null", "true", "false", "nan", "inf")
    return text if plain else quote(text)


def _split(text: str) -> list[str]:
    """Cut at the commas that stand outside of quotes and brackets. Raises ValueError for what is left open."""
    parts, start, stack, quoted, i = [], 0, [], "", 0
    while i < len(text):
        char = text[i]
        if char == "\\":
            i += 1
        elif quoted:
            if char == quoted:
                quoted = ""
        elif char in "'\"":
            quoted = char
        elif char in _CLOSING:
            stack.append(_CLOSING[char])
        elif char in "]})":
            if not stack or stack.pop() != char:
                raise ValueError(f"{char!r} closes nothing")
        elif char == "," and not stack:
            parts.append(text[start:i])
            start = i + 1
        i += 1
    if quoted:
        raise ValueError(f"the quote {quoted} is not closed")
    if stack:
        raise ValueError(f"{stack[-1]!r} is missing")
    return [*parts, text[start:]]


def _parse_values(raw: str) -> tuple[tuple[Any, ...], bool]:
    """The values of a sweep, or the one value."""
    if raw.strip() == "":
        return ("",), False
    parts = _split(raw)
    if len(parts) > 1:
        return tuple(_parse_element(part) for part in parts), True
    function = _FUNCTION.fullmatch(raw.strip())
    if function is None:
        return (_parse_element(raw),), False
    name, inside = function[1], function[2]
    if name not in _FUNCTIONS:
        raise ValueError(f"{name}(...) is no function of Hydra's")
    arguments = [a for a in _split(inside) if a.strip()]
    if name == "choice":
        return tuple(_parse_element(a) for a in arguments), True
    if name == "range":
        return _parse_range(arguments), True
    if name in ("sort", "shuffle", "tag"):
        inner, sweep = _parse_values(",".join(a for a in arguments if not re.match(r"\s*\w+\s*=", a)))
        if name == "tag" or not sweep:
            return (UNKNOWN,), sweep
        return inner, True
    return (UNKNOWN,), name in _SWEEPS


def _parse_range(arguments: Sequence[str]) -> tuple[Any, ...]:
    try:
        bounds = [int(a) for a in arguments]
        return tuple(range(*bounds))
    except (ValueError, TypeError):
        return (UNKNOWN, UNKNOWN)


def _parse_element(text: str) -> Any:
    text = text.strip()
    if text[:1] in ("'", '"'):
        if len(text) < 2 or text[-1] != text[0]:
            raise ValueError("text stands beside a quoted part")
        return re.sub(r"\\(['\"\\])", r"\1", text[1:-1])
    if text.startswith("["):
        return [] if not text[1:-1].strip() else [_parse_element(part) for part in _split(text[1:-1])]
    if text.startswith("{"):
        pairs = [] if not text[1:-1].strip() else [part.partition(":") for part in _split(text[1:-1])]
        if any(not colon for _, colon, _ in pairs):
            raise ValueError("a {...} needs key:value pairs")
        return {key.strip(): _parse_element(value) for key, _, value in pairs}
    if "${" in text or _FUNCTION.fullmatch(text):
        return UNKNOWN
    fits = _UNQUOTED.match(text)
    end = fits.end() if fits else 0
    if end < len(text):
        raise ValueError(f"it contains {text[end]!r}, which has a meaning of its own or is not allowed bare")
    return _convert(text)


def _convert(text: str) -> Any:
    lowered = text.lower()
    if lowered == "null":
        return None
    if lowered in ("true", "false"):
        return lowered == "true"
    if _INT.fullmatch(text):
        return int(text)
    if _FLOAT.fullmatch(text):
        return float(text)
    return re.sub(r"\\(.)", r"\1", text)


# ------------------------------------------------------------------------------- recommended


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
                f"data={typed['data']} recommends {key}, which is not a key of {group}={choices[group]}."
                " Mend the recommended block of the data set's YAML file."
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
        f"data={data} recommends nothing for model={model}: taking {filled} as their files have them."
    ]


def expand(overrides: Sequence[str], config_dirs: Sequence[Path | str] = ()) -> tuple[list[str], list[str]]:
    """Fill in the data set's recommended choices and values, and every metric where none is chosen.

    Returns the longer list of overrides, and notes for a person. What is in `overrides` always wins;
    doing it twice changes nothing. Swept groups are left alone: each job of the sweep expands its own.
    """
    catalogue = Catalogue(config_dirs)
    parsed = with_own_class([parse(text) for text in overrides])
    if any(o.sweep and o.key in catalogue.groups for o in parsed):
        return [render(o) for o in parsed], []
    settled = resolve(catalogue, [o.single(o.values[0]) if o.sweep else o for o in parsed])
    plain = [render(_as_hydra_checks(catalogue, o, settled.choices)) for o in parsed]
    return [*plain, *settled.additions], list(settled.notes)


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
