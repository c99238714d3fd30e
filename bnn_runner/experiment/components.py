"""Objects from configuration nodes: `_target_` names a trusted class, the other keys are its fields."""

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
    """What a `_target_` names. Raises `UserError`, before anything is imported, unless its package is trusted."""
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
    found = getattr(module, class_name, None)
    if found is None:
        near = did_you_mean(class_name, [n for n, v in vars(module).items() if isinstance(v, type)])
        raise UserError(f"{where}._target_: module {module_name} has no {class_name}.{near} Correct the name.")
    return found


def build(node: Any, allow: Sequence[str] = (), where: str = "", what: str = "") -> Any:
    """The object a node's `_target_` and further keys describe.

    `where` is the dotted place of the node ('schedule') and `what` its choice ('schedule=adam'), for
    messages. Raises `UserError` with every problem: untrusted or missing class, unknown, missing or
    wrong fields, and what the class refuses.
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
    arguments, found = check_fields(cls, values, prefix, what or where or cls.__name__)
    raise_all(problems + found)
    made, problems = attempt(cls, arguments)
    raise_all(problems)
    return made


def reach(config_dir: Path) -> None:
    """Let trusted classes be imported from the user's folder or from beside it (after everything installed)."""
    for folder in (config_dir.resolve(), config_dir.resolve().parent):
        if os.fspath(folder) not in sys.path:
            sys.path.append(os.fspath(folder))
