"""The configuration of one run, resolved once and frozen. An experiment is built from it, in any process.

Imports neither Hydra nor torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

import yaml

from bnn_runner.config.groups import flatten
from bnn_runner.config.overrides import parse, to_text

_DUMPER: Any = getattr(yaml, "CSafeDumper", yaml.SafeDumper)
_LOADER: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


@dataclass(frozen=True)
class RunConfig:
    """Every setting of one run, fully resolved.

    Attributes:
        tree: The composed configuration, without `hydra` and without the blocks `recommended` and `debug`. Frozen:
            mappings are read-only and lists are tuples; `plain` returns an ordinary copy.
        choices: Group -> name of its choice; a tuple of names for metrics.
        overrides: The command line that gives this configuration again, even if recommendations change later.
        typed: The command line as the user typed it.
        notes: Lines for the user about how the configuration was resolved.
        config_dir: The folder given as --config-dir.
        start: The folder to which relative paths refer.
    """

    tree: Mapping[str, Any]
    choices: Mapping[str, Any]
    overrides: tuple[str, ...] = ()
    typed: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    config_dir: Path | None = None
    start: Path = field(default_factory=Path.cwd)

    def __post_init__(self) -> None:
        object.__setattr__(self, "tree", _frozen(self.tree))
        object.__setattr__(self, "choices", _frozen(self.choices))

    def plain(self) -> dict[str, Any]:
        """Returns a copy of the tree as dictionaries and lists."""
        copy: dict[str, Any] = thawed(self.tree)
        return copy

    def get(self, key: str) -> Any:
        """Returns the value of a dotted key; None if the key does not exist."""
        return flatten(self.tree).get(key)

    def changed(self, changes: Mapping[str, Any]) -> RunConfig:
        """Returns the run with other values of some dotted keys, in the tree and in the overrides."""
        if all(self.get(key) == _frozen(value) for key, value in changes.items()):
            return self
        tree = self.plain()
        for key, value in changes.items():
            node = tree
            *path, last = key.split(".")
            for name in path:
                node = node.setdefault(name, {})
            node[last] = thawed(value)
        kept = [text for text in self.overrides if parse(text).key not in changes]
        overrides = (*kept, *(f"{key}={to_text(thawed(value))}" for key, value in changes.items()))
        return replace(self, tree=tree, overrides=overrides)

    def with_facts(self, facts: Mapping[str, Any]) -> RunConfig:
        """Returns the run with further keys in the tree (such as the digest of a file) and unchanged overrides."""
        return replace(self.changed(facts), overrides=self.overrides)

    def to_text(self) -> str:
        """Returns all fields as YAML, for a job in another process or on another machine."""
        fields = {
            "tree": self.plain(),
            "choices": thawed(self.choices),
            "overrides": list(self.overrides),
            "typed": list(self.typed),
            "notes": list(self.notes),
            "config_dir": None if self.config_dir is None else str(self.config_dir),
            "start": str(self.start),
        }
        text: str = yaml.dump(fields, Dumper=_DUMPER, sort_keys=False, allow_unicode=True)
        return text

    @classmethod
    def from_text(cls, text: str) -> RunConfig:
        """Reads what `to_text` wrote."""
        fields = yaml.load(text, Loader=_LOADER)
        return cls(
            tree=fields["tree"],
            choices=fields["choices"],
            overrides=tuple(fields["overrides"]),
            typed=tuple(fields["typed"]),
            notes=tuple(fields["notes"]),
            config_dir=None if fields["config_dir"] is None else Path(fields["config_dir"]),
            start=Path(fields["start"]),
        )


def _frozen(value: Any) -> Any:
    if isinstance(value, Mapping):
        return MappingProxyType({key: _frozen(v) for key, v in value.items()})
    if isinstance(value, (list, tuple)):
        return tuple(_frozen(v) for v in value)
    return value


def thawed(value: Any) -> Any:
    """Returns a copy of a frozen tree as ordinary dictionaries and lists."""
    if isinstance(value, Mapping):
        return {key: thawed(v) for key, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [thawed(v) for v in value]
    return value
