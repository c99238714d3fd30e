"""The choices there are: groups and YAML files of the packaged conf/ and of the user's --config-dir.

Reads YAML only; imports neither Hydra nor torch, so that a mistake is told in well under a second.
"""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import yaml

from bnn_runner.errors import UserError, did_you_mean

RECOMMENDED = "recommended"
"""The placeholder choice that stands for what the data set recommends."""

GLOBAL_GROUPS = ("experiment", "debug")
"""Groups whose files set other groups' choices and keys (`# @package _global_`)."""

BLOCKS = {"data": "recommended", "method": "debug"}
"""What the files of a group hold beside the keys of their class: settings that go with the choice.

`recommended` of a data set is taken for what is not chosen; `debug` of a method under any choice of debug.
"""


class _Loader(getattr(yaml, "CSafeLoader", yaml.SafeLoader)):  # type: ignore[misc]
    """Reads numbers as OmegaConf does: 1e-3 is a float (plain YAML 1.1 takes it for text)."""


_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float",
    re.compile(r"^[-+]?(?:\d[\d_]*\.?[\d_]*|\.\d[\d_]*)[eE][-+]?\d+$"),
    list("-+0123456789."),
)


def packaged_conf() -> Path:
    """The folder of the built-in configuration: conf/ of this code's source tree, or as installed, bnn_runner.conf.

    The source tree comes first: a checkout never runs with the configuration of another one that is installed.
    """
    tree = Path(__file__).resolve().parents[2]
    places = [tree / "conf"] if (tree / "pyproject.toml").is_file() else []
    try:
        found = importlib.util.find_spec("bnn_runner.conf")
    except ModuleNotFoundError:
        found = None
    places += [Path(p) for p in (found.submodule_search_locations or [])] if found else []
    for place in places:
        if (place / "config.yaml").is_file():
            return place.resolve()
    raise UserError("The built-in configuration (conf/config.yaml) is missing. Reinstall bnn-runner.")


def merge(low: Mapping[str, Any], high: Mapping[str, Any]) -> dict[str, Any]:
    """`high` over `low`, mapping by mapping."""
    merged = dict(low)
    for key, value in high.items():
        old = merged.get(key)
        merged[key] = merge(old, value) if isinstance(old, Mapping) and isinstance(value, Mapping) else value
    return merged


def flatten(tree: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Dotted keys of the leaves; an empty mapping is a leaf."""
    flat: dict[str, Any] = {}
    for key, value in tree.items():
        name = f"{prefix}{key}"
        if isinstance(value, Mapping) and value:
            flat |= flatten(value, f"{name}.")
        else:
            flat[name] = value
    return flat


class Catalogue:
    """Groups and their choices over the packaged folder and further ones (the first to name a choice wins)."""

    def __init__(self, config_dirs: Sequence[Path | str] = ()) -> None:
        self.dirs = (packaged_conf(), *(Path(d) for d in config_dirs))
        self._parsed: dict[Path, dict[str, Any]] = {}

    @cached_property
    def groups(self) -> dict[str, dict[str, Path]]:
        """Group name -> choice name -> file."""
        found: dict[str, dict[str, Path]] = {}
        for folder in self.dirs:
            for path in sorted(folder.glob("*/*.yaml")):
                if path.parent.name != "hydra":
                    found.setdefault(path.parent.name, {}).setdefault(path.stem, path)
        return found

    @cached_property
    def base(self) -> dict[str, Any]:
        """config.yaml's own settings: without its defaults list, Hydra's settings and keys of groups."""
        left_out = {"defaults", "hydra", *self.groups}
        return {k: v for k, v in self._read(self.dirs[0] / "config.yaml").items() if k not in left_out}

    @cached_property
    def shared(self) -> dict[str, dict[str, Any]]:
        """Group -> keys that every choice of it has beside its own (model.weights)."""
        return {k: v for k, v in self._read(self.dirs[0] / "config.yaml").items() if k in self.groups}

    @cached_property
    def defaults(self) -> dict[str, Any]:
        """Group -> choice (or list of choices, or None) of config.yaml's defaults list."""
        chosen: dict[str, Any] = {}
        for entry in self._read(self.dirs[0] / "config.yaml").get("defaults", []):
            if isinstance(entry, dict):
                for key, choice in entry.items():
                    if not key.startswith("override "):
                        chosen[key.removeprefix("optional ")] = choice
        return chosen

    def choices(self, group: str) -> list[str]:
        """Names of a group's choices, sorted."""
        return sorted(self.groups.get(group, {}))

    def problem_with(self, group: str, choice: str) -> str | None:
        """Why `group=choice` cannot be: the choice is unknown, with the nearest and the full list."""
        if choice in self.groups.get(group, {}):
            return None
        if (group, choice) == ("metric", "dee"):
            return (
                "metric=dee is not a score of a single run: the ensemble equivalent compares runs with deep "
                "ensembles. Run these too (method=map; -m method=ensemble method.size=2,3,5; for classes with "
                "eval.calibrate=temperature), then bnn-report --equivalents."
            )
        names = self.choices(group)
        listed = ", ".join(names) or "none"
        return f"{group}={choice} is unknown.{did_you_mean(choice, names)} Choices of {group}: {listed}."

    def load(self, group: str, choice: str) -> dict[str, Any]:
        """The choice's keys over those of its bases: the choices of its group that its defaults list names."""
        problem = self.problem_with(group, choice)
        if problem:
            raise UserError(problem)
        own = self._read(self.groups[group][choice])
        tree: dict[str, Any] = {}
        body = {k: v for k, v in own.items() if k != "defaults"}
        placed = False
        for entry in own.get("defaults") or []:
            if entry == "_self_":
                tree, placed = merge(tree, body), True
            elif isinstance(entry, str) and (base := entry.partition("@")[0]) != choice and base in self.groups[group]:
                tree = merge(tree, self.load(group, base))
        return tree if placed else merge(tree, body)

    def base_of(self, group: str, choice: str) -> str | None:
        """The choice of the same group that this one inherits from; None for one that stands alone."""
        entries = self._read(self.groups[group][choice]).get("defaults") or []
        names = [e.partition("@")[0] for e in entries if isinstance(e, str)]
        bases = [name for name in names if name not in ("_self_", choice) and name in self.groups[group]]
        return bases[-1] if bases else None

    def group_overrides(self, group: str, choice: str) -> dict[str, Any]:
        """Group -> choice that an experiment's defaults list sets (`- override /data: yacht`)."""
        found: dict[str, Any] = {}
        for entry in self._read(self.groups[group][choice]).get("defaults") or []:
            if isinstance(entry, str) and entry != choice and entry in self.groups[group]:
                found |= self.group_overrides(group, entry)
            elif isinstance(entry, dict):
                for key, value in entry.items():
                    if key.startswith("override /"):
                        found[key.removeprefix("override /").split("@")[0]] = value
        return found

    def is_open(self, group: str, choice: Any) -> bool:
        """Whether the choice leaves its class to the user: then its other keys are that class's own."""
        known = isinstance(choice, str) and choice in self.groups.get(group, {})
        return known and self.load(group, choice).get("_target_", "") is None

    def help_line(self, group: str, choice: str) -> str:
        """The first comment of the choice's file (after Hydra's `# @package` header)."""
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
        """Metric files that Hydra would put in each other's place: the package header must be the first line."""
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
