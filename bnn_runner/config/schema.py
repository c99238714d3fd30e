"""Checks the values of a configuration against the annotated fields of a dataclass. Imports nothing heavy."""

from __future__ import annotations

import dataclasses
import inspect
import sys
import types
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, Literal, Union, get_args, get_origin

from bnn_runner.config.overrides import to_text
from bnn_runner.errors import did_you_mean
from bnn_runner.runtime.files import expand_home

_NAMES = {
    int: "a whole number",
    float: "a number",
    bool: "true or false",
    str: "text",
    type(None): "null",
    Path: "a path",
    list: "a list",
    dict: "a mapping {key:value}",
}


class Mismatch(Exception):
    """A value does not fit an annotation.

    Args:
        expected: What the annotation accepts: 'a whole number'.
        hint: A sentence that says what to write, or ''.
    """

    def __init__(self, expected: str, hint: str = "") -> None:
        super().__init__(f"{expected}. {hint}".strip())
        self.expected, self.hint = expected, hint.strip()


def describe(annotation: Any) -> str:
    """Describes an annotation in plain English: 'a whole number or null'."""
    origin = get_origin(annotation)
    if origin is Literal:
        return "one of " + ", ".join(map(str, get_args(annotation)))
    if origin in (Union, types.UnionType):
        return " or ".join(describe(a) for a in get_args(annotation))
    if origin in (list, tuple, Sequence, Iterable):
        inner = [a for a in get_args(annotation) if a is not Ellipsis]
        if inner and get_origin(inner[0]) is Literal:
            return "a list with values from " + ", ".join(map(str, get_args(inner[0])))
        return f"a list of {describe(inner[0]).removeprefix('a ').removeprefix('an ')}s" if inner else "a list"
    if origin in (dict, Mapping):
        return _NAMES[dict]
    return _NAMES.get(annotation, getattr(annotation, "__name__", str(annotation)))


def convert(annotation: Any, value: Any) -> Any:
    """Converts a value of a configuration to the type of an annotation.

    Lists become tuples, integers become floats and strings become paths, as the annotation requires. An annotation of
    another kind accepts every value: the class must check it.

    Raises:
        Mismatch: If the value does not fit the annotation.
    """
    if annotation in (Any, object) or isinstance(annotation, str):
        return value
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin is Literal:
        if any(value == a and type(value) is type(a) for a in arguments):
            return value
        raise Mismatch(describe(annotation), did_you_mean(str(value), map(str, arguments)))
    if origin in (Union, types.UnionType):
        return _convert_union(annotation, arguments, value)
    if origin in (list, tuple, Sequence, Iterable) or annotation in (list, tuple):
        return _convert_sequence(annotation, origin or annotation, arguments, value)
    if origin in (dict, Mapping) or annotation is dict:
        if not isinstance(value, Mapping):
            raise Mismatch(describe(annotation))
        return {k: convert(arguments[1], v) if len(arguments) == 2 else v for k, v in value.items()}
    if annotation is Path and isinstance(value, str):
        return expand_home(value)
    if annotation is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if annotation is int and isinstance(value, float) and value.is_integer():
        raise Mismatch(describe(annotation), f"Write {int(value)}.")
    if annotation is int and isinstance(value, bool):
        raise Mismatch(describe(annotation))
    if annotation in (int, float, bool, str) and not isinstance(value, annotation):
        hint = ""
        if annotation is str and isinstance(value, (int, float)):
            hint = " Quote text that looks like a number twice: '\"3\"'."
        raise Mismatch(describe(annotation), hint)
    if annotation in (None, type(None)) and value is not None:
        raise Mismatch("null")
    return value


def _convert_union(annotation: Any, arguments: Sequence[Any], value: Any) -> Any:
    exact_first = sorted(arguments, key=lambda a: a is not type(value))  # an int stays an int in `float | int`
    hints = []
    for option in exact_first:
        try:
            return convert(option, value)
        except Mismatch as mismatch:
            if get_origin(option) is Literal and mismatch.hint:
                hints.append(mismatch.hint)
    raise Mismatch(describe(annotation), " ".join(hints))


def _convert_sequence(annotation: Any, origin: Any, arguments: Sequence[Any], value: Any) -> Any:
    if not isinstance(value, (list, tuple)):
        example = "[]" if value is None else f"[{value}]"
        raise Mismatch(f"{describe(annotation)}, as in {example}")
    if origin is tuple and arguments and arguments[-1] is not Ellipsis:
        if len(arguments) != len(value):
            raise Mismatch(f"a list of {len(arguments)} values")
        return tuple(convert(a, v) for a, v in zip(arguments, value, strict=True))
    try:
        items = [convert(arguments[0], v) for v in value] if arguments else list(value)
    except Mismatch as inner:
        if get_origin(arguments[0]) is Literal:  # the description lists the choices already
            raise Mismatch(describe(annotation), inner.hint) from None
        raise Mismatch(f"{describe(annotation)}, each {inner.expected}", inner.hint) from None
    return items if origin is list else tuple(items)


def field_types(cls: type) -> dict[str, Any]:
    """Returns field name -> annotation; Any for an annotation with a name that is imported under TYPE_CHECKING."""
    annotations: dict[str, Any] = {}
    for item in dataclasses.fields(cls):
        if not item.init:
            continue
        annotation: Any = item.type
        if isinstance(annotation, str):
            owner = next((c for c in cls.__mro__ if item.name in inspect.get_annotations(c)), cls)
            scope = vars(sys.modules[owner.__module__]) if owner.__module__ in sys.modules else {}
            try:
                annotation = eval(annotation, dict(scope))
            except (NameError, AttributeError, TypeError, SyntaxError):
                annotation = Any
        annotations[item.name] = Any if get_origin(annotation) is ClassVar else annotation
    return annotations


def check_fields(cls: type, values: Mapping[str, Any], prefix: str, what: str) -> tuple[dict[str, Any], list[str]]:
    """Checks values for the fields of a dataclass and converts them.

    Args:
        cls: The dataclass.
        values: Field name -> value.
        prefix: What the user types before a field's name: 'schedule.'.
        what: Name of the choice: 'schedule=adam'.

    Returns:
        The converted values, and one message for each problem: unknown field, missing field, wrong type.
    """
    annotations = field_types(cls)
    problems = []
    arguments = {}
    for name, value in values.items():
        if name not in annotations:
            known = ", ".join(f"{prefix}{n}" for n in annotations) or "none"
            near = did_you_mean(prefix + name, [prefix + n for n in annotations])
            problems.append(f"{prefix}{name} is not a key of {what}.{near} Its keys: {known}.")
            continue
        try:
            arguments[name] = convert(annotations[name], value)
        except Mismatch as mismatch:
            hint = f" {mismatch.hint}" if mismatch.hint else ""
            problems.append(f"{prefix}{name} must be {mismatch.expected}; got {show(value)}.{hint}")
    for item in dataclasses.fields(cls):
        required = item.init and item.default is dataclasses.MISSING and item.default_factory is dataclasses.MISSING
        if required and item.name not in values:
            problems.append(f"{prefix}{item.name} is missing; {what} requires it. Set {prefix}{item.name}=...")
    return arguments, problems


def show(value: Any) -> str:
    """Returns a value as the user would type it."""
    return value if isinstance(value, str) else to_text(value)
