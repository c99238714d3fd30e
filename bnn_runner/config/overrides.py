"""Parser of command-line overrides (Hydra's `key=value` language). Imports neither Hydra nor torch."""

from __future__ import annotations

import re
import shlex
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from bnn_runner.errors import UserError


class _Unknown:
    """A value that only Hydra can evaluate (an interpolation, a function)."""

    def __repr__(self) -> str:
        return "<unknown>"


UNKNOWN = _Unknown()


@dataclass(frozen=True)
class Override:
    """One `[+|++|~]key[@package][=value]`, or `key?=value`.

    Attributes:
        text: The override as typed.
        prefix: '', '+', '++' or '~'.
        key: Dotted key or group.
        package: Text after '@', or ''.
        raw: Text after '='; None without one.
        values: The parsed value, or all values of a sweep; `UNKNOWN` for a value that only Hydra can evaluate.
        sweep: Whether it is a sweep.
        optional: Whether it is written `key?=value`: it applies only where the key exists.
    """

    text: str
    prefix: str
    key: str
    package: str
    raw: str | None
    values: tuple[Any, ...]
    sweep: bool
    optional: bool = False

    @property
    def value(self) -> Any:
        return self.values[0] if self.values else None

    def single(self, value: Any) -> Override:
        """Returns the same override with one value instead of a sweep."""
        return replace(self, values=(value,), sweep=False, raw=to_text(value))


_OPTIONAL = "$"
"""Stands for the '?' of `key?=value` in overrides for Hydra, whose keys have no '?'."""
_OVERRIDE = re.compile(
    r"(?P<prefix>\+\+|\+|~|)(?P<key>[^=@+~\s]+?)(?:@(?P<package>[^=\s]*))?(?P<optional>[?$])?(?:=(?P<raw>.*))?",
    re.DOTALL,
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
    """Parses one override.

    Raises:
        UserError: If `text` is not an override; the message says what to type instead.
    """
    match = _OVERRIDE.fullmatch(text)
    if match is None or (match["raw"] is None and match["prefix"] != "~"):
        raise UserError(f"{text!r} is not an override. Write key=value, without spaces around the '='.")
    raw = match["raw"]
    key = match["key"]
    if raw is None:
        return Override(text, match["prefix"], key, match["package"] or "", None, (), False)
    optional = match["optional"] is not None
    if match["optional"] == "?" and match["prefix"]:
        raise UserError(f"{text!r}: a key that is set with ?= takes no {match['prefix']}. Write {key}?={raw}.")
    if raw.startswith("~/") or raw == "~":  # Hydra's grammar requires quotes around a value with ~
        raw = quote(raw)
    try:
        values, sweep = _parse_values(raw)
    except ValueError as error:
        raise UserError(
            f"Could not read {text!r}: {error}. Quote the value twice, for the shell and for Hydra: '"
            f"{match['prefix']}{key}={quote(match['raw'].strip(chr(39) + chr(34)))}'."
        ) from None
    prefix, text = ("", as_typed(text)) if optional else (match["prefix"], text)
    return Override(text, prefix, key, match["package"] or "", raw, values, sweep, optional)


def render(override: Override) -> str:
    """Returns the override as text for Hydra, which adds an optional key under another name and never reads it."""
    if override.optional:
        return f"++{override.key}{_OPTIONAL}={override.raw}"
    at = f"@{override.package}" if override.package else ""
    tail = "" if override.raw is None else f"={override.raw}"
    return f"{override.prefix}{override.key}{at}{tail}"


def as_typed(text: str) -> str:
    """Returns an override as the user would type it: what `render` returned, without its signs for Hydra."""
    return re.sub(rf"^([^=\s]+)\{_OPTIONAL}=", r"\1?=", text.lstrip("+"))


def command_line(overrides: Sequence[str], config_dir: Path | str | None = None, multirun: bool = False) -> str:
    """Returns the shell command for a run, or with `multirun` for a sweep, with these overrides."""
    words = ["bnn-run", *(["-m"] if multirun else [])]
    words += [*([] if config_dir is None else ["--config-dir", str(config_dir)]), *overrides]
    return " ".join(w if re.fullmatch(r"[\w@%+=:,./-]+", w) else shlex.quote(w) for w in words)


def quote(text: str) -> str:
    """Returns `text` in double quotes, escaped for Hydra's grammar."""
    return '"' + re.sub(r'(\\*)"', r'\1\1\\"', text) + '"'


def to_text(value: Any) -> str:
    """Returns a value as text in Hydra's override grammar."""
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
    """Splits at the commas outside quotes and brackets. Raises ValueError for an unclosed quote or bracket."""
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
                raise ValueError(f"{char!r} has no opening bracket")
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
    """Returns the values (several for a sweep), and whether it is a sweep."""
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
        raise ValueError(f"Hydra has no function {name}(...)")
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


def glob_patterns(raw: str) -> tuple[list[str], list[str]] | None:
    """Returns the patterns of glob(include, exclude=...) that are included and excluded; None for another value."""
    function = _FUNCTION.fullmatch(raw.strip())
    if function is None or function[1] != "glob":
        return None
    patterns: dict[str, list[str]] = {"include": [], "exclude": []}
    for place, argument in enumerate(_split(function[2])):
        named = re.fullmatch(r"\s*(include|exclude)\s*=(.*)", argument, re.DOTALL)
        name = named[1] if named else ("include", "exclude")[min(place, 1)]
        value = _parse_element(named[2] if named else argument)
        patterns[name] += [str(v) for v in (value if isinstance(value, list) else [value])]
    return patterns["include"], patterns["exclude"]


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
            raise ValueError("there is text before or after a quoted part")
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
    unquoted = _UNQUOTED.match(text)
    end = unquoted.end() if unquoted else 0
    if end < len(text):
        raise ValueError(f"{text[end]!r} must be quoted")
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
