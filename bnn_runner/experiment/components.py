"""Builds objects from configuration nodes: `_target_` names a trusted class, the other keys are its fields."""

from __future__ import annotations

import dataclasses
import importlib
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from bnn_runner.config.schema import check_fields
from bnn_runner.config.settings import attempt
from bnn_runner.errors import UserError, did_you_mean, raise_all


def locate(target: Any, allow: Sequence[str], where: str) -> Any:
    """Imports what a `_target_` names.

    Args:
        target: The value of `_target_`: 'package.module.Class'.
        allow: Trusted packages, in addition to this one.
        where: Dotted place of the node, for messages.

    Raises:
        UserError: If the package is not trusted (then nothing is imported), or the class does not exist.
    """
    if target is None:
        raise UserError(f"{where} requires a class of your own. Set {where}._target_=package.module.Class.")
    if not isinstance(target, str) or "." not in target:
        raise UserError(f"{where}._target_ must name a class as package.module.Class; got {target!r}.")
    package = target.split(".")[0]
    if package != "bnn_runner" and package not in allow:
        raise UserError(
            f"{where} uses {target}, but the package {package} is not trusted. To trust it, add allow=["
            f"{','.join([*allow, package])}]."
        )
    module_name, _, class_name = target.rpartition(".")
    try:
        module = importlib.import_module(module_name)
    except ImportError as error:
        missing = getattr(error, "name", None) or module_name
        raise UserError(
            f"{where}: could not import {module_name} ({error}). Install {missing.split('.')[0]}, or put its "
            "folder on PYTHONPATH or next to the folder given as --config-dir."
        ) from error
    located = getattr(module, class_name, None)
    if located is None:
        near = did_you_mean(class_name, [n for n, v in vars(module).items() if isinstance(v, type)])
        raise UserError(f"{where}._target_: module {module_name} has no {class_name}.{near} Correct the name.")
    return located


def build(node: Any, allow: Sequence[str] = (), where: str = "", what: str = "") -> Any:
    """Builds the object that a configuration node describes.

    Args:
        node: A mapping with `_target_` and the fields of that class; values may be nodes themselves.
        allow: Trusted packages, in addition to this one.
        where: Dotted place of the node, for messages: 'schedule'.
        what: Choice of the node, for messages: 'schedule=adam'.

    Raises:
        UserError: With every problem: untrusted or missing class; unknown, missing or mistyped fields; the checks of
            the class itself.
    """
    if not isinstance(node, Mapping):
        raise UserError(f"{where or 'This node'} must be a mapping with a _target_; got {node!r}. Choose one by name.")
    target = node.get("_target_")
    cls = locate(target, allow, where or str(target))
    if not (isinstance(cls, type) and dataclasses.is_dataclass(cls)):
        if where == "model" and callable(cls):
            from bnn_runner.models.module import own_module

            return own_module(cls, {k: v for k, v in node.items() if k != "_target_"}, str(target))
        raise UserError(f"{where}._target_ must be a dataclass whose fields are the keys of its YAML; got {target}.")
    values: dict[str, Any] = {}
    problems: list[str] = []
    prefix = f"{where}." if where else ""
    for key, value in node.items():
        if key == "_target_":
            continue
        if isinstance(value, Mapping) and "_target_" in value:
            try:
                value = build(value, allow, f"{prefix}{key}")
            except UserError as error:
                problems += error.problems
                continue
        values[key] = value
    arguments, new_problems = check_fields(cls, values, prefix, what or where or cls.__name__)
    raise_all(problems + new_problems)
    instance, problems = attempt(cls, arguments)
    raise_all(problems)
    return instance


def add_to_import_path(config_dir: Path) -> None:
    """Appends the user's folder and its parent to `sys.path`, so that trusted classes can be imported from there."""
    for folder in (config_dir.resolve(), config_dir.resolve().parent):
        if os.fspath(folder) not in sys.path:
            sys.path.append(os.fspath(folder))
