"""Groups and their choices: the YAML files of the built-in conf/ and of the user's --config-dir.

Reads YAML only and imports neither Hydra nor torch, so that usage errors are reported in well under a second.
"""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import yaml

from bnn_runner.config.other_programs import CHOICES
from bnn_runner.errors import UserError, did_you_mean

RECOMMENDED = "recommended"
"""Placeholder choice; it is replaced by the choice that the data set recommends."""

GLOBAL_GROUPS = ("experiment", "debug")
"""Groups whose files set other groups' choices and keys (`# @package _global_`)."""

BLOCKS = {"data": "recommended", "method": "debug"}
"""Group -> a block in its files that holds other settings instead of arguments of the class.

`recommended` of a data set: values for everything that the user did not set. `debug` of a method: values for runs with
any choice of debug.
"""


class _Loader(getattr(yaml, "CSafeLoader", yaml.SafeLoader)):  # type: ignore[misc]
    """Reads numbers as OmegaConf does: 1e-3 is a float (in plain YAML 1.1 it is text)."""


_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float",
    re.compile(r"^[-+]?(?:\d[\d_]*\.?[\d_]*|\.\d[\d_]*)[eE][-+]?\d+$"),
    list("-+0123456789."),
)


def packaged_conf() -> Path:
    """Returns the folder of the built-in configuration.

    That is conf/ of the source tree if this code runs from one, else the installed package bnn_runner.conf. The source
    tree comes first so that a checkout never uses the configuration of another, installed version.

    Raises:
        UserError: If neither exists.
    """
    tree = Path(__file__).resolve().parents[2]
    folders = [tree / "conf"] if (tree / "pyproject.toml").is_file() else []
    try:
        spec = importlib.util.find_spec("bnn_runner.conf")
    except ModuleNotFoundError:
        spec = None
    folders += [Path(p) for p in (spec.submodule_search_locations or [])] if spec else []
    for folder in folders:
        if (folder / "config.yaml").is_file():
            return folder.resolve()
    raise UserError("The built-in configuration (conf/config.yaml) is missing. Reinstall bnn-runner.")


def merge(low: Mapping[str, Any], high: Mapping[str, Any]) -> dict[str, Any]:
    """Returns `low` updated with `high`; nested mappings are merged key by key."""
    merged = dict(low)
    for key, value in high.items():
        old = merged.get(key)
        merged[key] = merge(old, value) if isinstance(old, Mapping) and isinstance(value, Mapping) else value
    return merged


def flatten(tree: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Returns the leaves of a nested mapping by their dotted keys; an empty mapping is a leaf."""
    flat: dict[str, Any] = {}
    for key, value in tree.items():
        name = f"{prefix}{key}"
        if isinstance(value, Mapping) and value:
            flat |= flatten(value, f"{name}.")
        else:
            flat[name] = value
    return flat


class Catalogue:
    """The groups and choices of the built-in folder and of further ones.

    Args:
        config_dirs: Further folders. If several folders define a choice, the first one wins; the built-in folder
            comes before these.
    """

    def __init__(self, config_dirs: Sequence[Path | str] = ()) -> None:
        self.dirs = (packaged_conf(), *(Path(d) for d in config_dirs))
        self._parsed: dict[Path, dict[str, Any]] = {}

    @cached_property
    def groups(self) -> dict[str, dict[str, Path]]:
        """Group name -> choice name -> file."""
        groups: dict[str, dict[str, Path]] = {}
        for folder in self.dirs:
            for path in sorted(folder.glob("*/*.yaml")):
                if path.parent.name != "hydra":
                    groups.setdefault(path.parent.name, {}).setdefault(path.stem, path)
        return groups

    @cached_property
    def base(self) -> dict[str, Any]:
        """The top-level settings of config.yaml: without its defaults list, Hydra's settings and keys of groups."""
        excluded = {"defaults", "hydra", *self.groups}
        return {k: v for k, v in self._read(self.dirs[0] / "config.yaml").items() if k not in excluded}

    @cached_property
    def shared(self) -> dict[str, dict[str, Any]]:
        """Group -> keys that all its choices have in addition to their own (model.weights)."""
        return {k: v for k, v in self._read(self.dirs[0] / "config.yaml").items() if k in self.groups}

    @cached_property
    def defaults(self) -> dict[str, Any]:
        """Group -> choice (or list of choices, or None) in config.yaml's defaults list."""
        defaults: dict[str, Any] = {}
        for entry in self._read(self.dirs[0] / "config.yaml").get("defaults", []):
            if isinstance(entry, dict):
                for key, choice in entry.items():
                    if not key.startswith("override "):
                        defaults[key.removeprefix("optional ")] = choice
        return defaults

    def choices(self, group: str) -> list[str]:
        """Returns the names of a group's choices, sorted."""
        return sorted(self.groups.get(group, {}))

    def problem_with(self, group: str, choice: str) -> str | None:
        """Returns a message if `group=choice` does not exist, with the closest names and the full list; else None."""
        if choice in self.groups.get(group, {}):
            return None
        if (group, choice) == ("metric", "dee"):
            return (
                "metric=dee is not a score of a single run: the ensemble equivalent compares a run with deep "
                "ensembles. Also run method=map and -m method=ensemble method.size=2,3,5 (for classification, all "
                "with eval.calibrate=temperature), then bnn-report --equivalents."
            )
        names = self.choices(group)
        listed = ", ".join(names) or "none"
        elsewhere = CHOICES.get(group, {}).get(re.sub(r"[-\s]", "_", choice.lower()))
        near = f" Did you mean {elsewhere}?" if elsewhere in names else did_you_mean(choice, names)
        return f"{group}={choice} is unknown.{near} Choices of {group}: {listed}."

    def load(self, group: str, choice: str) -> dict[str, Any]:
        """Reads a choice: its own keys, merged over those of the choices of the same group in its defaults list.

        Args:
            group: Name of the group.
            choice: Name of the choice.

        Returns:
            A nested dictionary of the choice's keys, without the group's name.

        Raises:
            UserError: If the choice is unknown or its file is not readable as YAML.
        """
        problem = self.problem_with(group, choice)
        if problem:
            raise UserError(problem)
        content = self._read(self.groups[group][choice])
        tree: dict[str, Any] = {}
        own_keys = {k: v for k, v in content.items() if k != "defaults"}
        merged_self = False
        for entry in content.get("defaults") or []:
            if entry == "_self_":
                tree, merged_self = merge(tree, own_keys), True
            elif isinstance(entry, str) and (base := entry.partition("@")[0]) != choice and base in self.groups[group]:
                tree = merge(tree, self.load(group, base))
        return tree if merged_self else merge(tree, own_keys)

    def base_of(self, group: str, choice: str) -> str | None:
        """Returns the choice of the same group that this one inherits from; None if there is none."""
        entries = self._read(self.groups[group][choice]).get("defaults") or []
        names = [e.partition("@")[0] for e in entries if isinstance(e, str)]
        bases = [name for name in names if name not in ("_self_", choice) and name in self.groups[group]]
        return bases[-1] if bases else None

    def group_overrides(self, group: str, choice: str) -> dict[str, Any]:
        """Returns group -> choice as set by the defaults list of an experiment file (`- override /data: yacht`)."""
        overrides: dict[str, Any] = {}
        for entry in self._read(self.groups[group][choice]).get("defaults") or []:
            if isinstance(entry, str) and entry != choice and entry in self.groups[group]:
                overrides |= self.group_overrides(group, entry)
            elif isinstance(entry, dict):
                for key, value in entry.items():
                    if key.startswith("override /"):
                        overrides[key.removeprefix("override /").split("@")[0]] = value
        return overrides

    def is_open(self, group: str, choice: Any) -> bool:
        """Whether the user gives the class of this choice (`_target_: null`); it then takes that class's keys."""
        known = isinstance(choice, str) and choice in self.groups.get(group, {})
        return known and self.load(group, choice).get("_target_", "") is None

    def help_line(self, group: str, choice: str) -> str:
        """Returns the first comment of the choice's file (after Hydra's `# @package` header)."""
        with self.groups[group][choice].open(encoding="utf-8") as file:
            for line in file:
                text = line.strip()
                if text and not text.startswith("#"):
                    break
                text = text.lstrip("#").strip()
                if text and not text.startswith("@"):
                    return text
        return ""

    def header_problems(self) -> list[str]:
        """Returns one message for each metric file without its `# @package` header in the first line.

        Without it, Hydra puts all metrics in the same place, so that one replaces the others.
        """
        problems = []
        for choice, path in self.groups.get("metric", {}).items():
            with path.open(encoding="utf-8") as file:
                first = file.readline().strip()
            if not re.fullmatch(rf"#\s*@package\s+metric\.{re.escape(choice)}", first):
                problems.append(
                    f"{path} must start with the line '# @package metric.{choice}'; without it the metric would "
                    "replace the others. Add the line."
                )
        return problems

    def _read(self, path: Path) -> dict[str, Any]:
        if path not in self._parsed:
            try:
                tree = yaml.load(path.read_text(encoding="utf-8"), Loader=_Loader)
            except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
                reason = " ".join(str(error).split())
                raise UserError(f"Could not read {path} as YAML: {reason}. Correct or remove the file.") from error
            if tree is not None and not isinstance(tree, dict):
                raise UserError(f"{path} must be a YAML mapping of key: value lines. Correct or remove the file.")
            self._parsed[path] = tree or {}
        return self._parsed[path]
