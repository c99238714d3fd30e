"""The contract of a choice: its YAML file has a help line, and its keys are the fields of its class."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bnn_runner.config.groups import BLOCKS, Catalogue
from bnn_runner.config.recommend import keys_of
from bnn_runner.experiment.components import build, locate
from bnn_runner.testing.expect import require


def check_choice(config_dir: Path | str, group: str, choice: str, allow: Sequence[str] = (), **changes: Any) -> Any:
    """The object that `config_dir/group/choice.yaml` describes, after a look at the file.

    - The first comment is a help line; a metric's file begins with its package header.
    - Its keys are the fields of its class, which is a frozen dataclass; a field with a default may be left out.
    - What a data set recommends and what a method shortens under debug=fast are keys that exist.

    Args:
        config_dir: the folder given as --config-dir, which adds to the built-in choices.
        group: data, model, method, hyper, metric, ...
        choice: name of the file, without .yaml.
        allow: packages whose classes may be built, as in allow=[mypackage].
        changes: fields with other values than the file's (to make it small for a check).

    Raises:
        AssertionError: saying which line of the contract does not hold.
        UserError: for values that the class refuses.
    """
    catalogue = Catalogue([config_dir])
    where = f"{group}/{choice}.yaml"
    require(choice in catalogue.groups.get(group, {}), f"{where} is missing in {config_dir}.")
    require(bool(catalogue.help_line(group, choice)), f"{where} must begin with a comment that says what it is.")
    headers = [p for p in catalogue.header_problems() if where in p.replace("\\", "/")]
    require(not headers, " ".join(headers))
    node = catalogue.load(group, choice)
    block = node.pop(BLOCKS.get(group, ""), None) or {}
    cls = locate(node.get("_target_"), allow, group)
    require(dataclasses.is_dataclass(cls), f"{where}: {node.get('_target_')} must be a frozen dataclass.")
    fields = {f.name for f in dataclasses.fields(cls)}
    none = dataclasses.MISSING
    defaults = {f.name for f in dataclasses.fields(cls) if f.default is not none or f.default_factory is not none}
    missing, unknown = sorted(fields - defaults - set(node)), sorted(set(node) - fields - {"_target_"})
    require(
        not missing and not unknown,
        f"The keys of {where} must be the fields of {cls.__name__}; missing: {missing}, unknown: {unknown}.",
    )
    require(cls.__dataclass_params__.frozen, f"{cls.__name__} must be frozen: @dataclass(frozen=True).")
    if group == "data":
        _check_recommended(catalogue, choice, block)
    foreign = sorted(set(block) - fields) if group == "method" else []
    require(not foreign, f"The debug block of {where} must name keys of the method; got {', '.join(foreign)}.")
    return build(node | changes, allow=allow, where=group, what=f"{group}={choice}")


def _check_recommended(catalogue: Catalogue, choice: str, block: dict[str, Any]) -> None:
    """Every recommended choice and key exists."""
    file = f"data/{choice}.yaml"
    chosen = {group: name for group, name in block.items() if group in catalogue.groups}
    for group, name in chosen.items():
        exists = name in catalogue.groups[group]
        require(exists, f"{file} must recommend existing choices; got {group}={name}.")
    for key in block.get("values") or {}:
        group, _, rest = key.partition(".")
        known = catalogue.base.get(group) if group in catalogue.base else keys_of(catalogue, group, chosen)
        if group in chosen or group in catalogue.base:
            exists = isinstance(known, dict) and rest.split(".")[0] in known
            require(exists, f"{file} must recommend existing keys; got {key}, which is not a key of {group}.")
