"""Separates flags from overrides. Imports nothing heavy."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from bnn_runner.errors import UserError, did_you_mean
from bnn_runner.runtime.files import expand_home

_WITH_VALUE = {"--config-dir", "-cd", "--package", "-p", "--cfg", "-c"}
_SWITCHES = {"--multirun", "-m", "--run", "-r", "--resolve"}
_REFUSED = {
    "--config-path": "Add your own choices with --config-dir FOLDER.",
    "--config-name": "Put your settings into an experiment file (conf/experiment/README.md).",
    "--experimental-rerun": "Every run leaves its command in command.txt: run that command again.",
}
_REFUSED |= {"-cp": _REFUSED["--config-path"], "-cn": _REFUSED["--config-name"]}


@dataclass
class CommandLine:
    """A command line, separated into overrides and flags.

    Attributes:
        overrides: The overrides as typed.
        flags: The flags for Hydra.
        config_dir: The folder given as --config-dir.
        multirun: Whether -m is given.
        help: Whether --help is given.
        topic: The topic of --help.
        version: Whether --version is given.
        shows_only: Whether a flag only shows something (--cfg, --info, ...) instead of running.
        for_hydra: Whether the flags are for Hydra alone (--hydra-help, --shell-completion); overrides do not count.
    """

    overrides: list[str] = field(default_factory=list)
    flags: list[str] = field(default_factory=list)
    config_dir: Path | None = None
    multirun: bool = False
    help: bool = False
    topic: str | None = None
    version: bool = False
    shows_only: bool = False
    for_hydra: bool = False

    @property
    def config_dirs(self) -> list[Path]:
        return [self.config_dir] if self.config_dir else []


def read_flags(argv: Sequence[str]) -> CommandLine:
    """Separates flags from overrides.

    Raises:
        UserError: For unknown or unsupported flags, and flags without a required value.
    """
    line = CommandLine()
    problems: list[str] = []
    words = list(argv)
    while words:
        word = words.pop(0)
        name, equals, value = word.partition("=")
        if not word.startswith("-") or word == "-":
            line.overrides.append(word)
        elif name in _REFUSED:
            problems.append(f"{name} is not supported. {_REFUSED[name]}")
            if not equals and words and not words[0].startswith("-"):
                words.pop(0)
        elif name in ("--help", "-h"):
            line.help = True
            if equals:
                line.topic = value
            elif words and not words[0].startswith("-"):
                line.topic = words.pop(0)
        elif name == "--version":
            line.version = True
        elif name in ("--info", "-i"):
            line.shows_only = True
            if not equals and words and not words[0].startswith("-") and "=" not in words[0]:
                value = words.pop(0)
            if (value or _INFO[0]) not in _INFO:
                problems.append(f"--info must be one of {', '.join(_INFO)}; got {value}.{did_you_mean(value, _INFO)}")
            line.flags += ["--info", value or _INFO[0]]
        elif name == "--hydra-help":
            line.flags, line.for_hydra = [name], True
        elif name in ("--shell-completion", "-sc"):
            value = words.pop(0) if words and not equals else value
            if not re.fullmatch(r"(install|uninstall|query)=(bash|zsh|fish)", value):
                problems.append(f'{name} requires a shell, as in: eval "$(bnn-run -sc install=bash)"')
            elif value.startswith("query") and "COMP_LINE" not in os.environ:
                problems.append(f"{name} {value} is called by the shell, which sets COMP_LINE. Use install instead.")
            line.flags, line.for_hydra = ["--shell-completion", value], True
        elif name in _WITH_VALUE:
            if not equals:
                if not words:
                    problems.append(f"{name} requires a value, as in --config-dir FOLDER or --cfg job.")
                    continue
                value = words.pop(0)
            problems += _set_flag(line, name, value)
        elif word in _SWITCHES:
            line.flags.append(word)
            line.multirun |= word in ("--multirun", "-m")
        else:
            problems.append(_unknown_flag(name, equals, value))
    if problems and not (line.help or line.version):
        raise UserError(*problems)
    return line


_INFO = ("all", "config", "defaults", "defaults-tree", "plugins", "searchpath")


def _set_flag(line: CommandLine, name: str, value: str) -> list[str]:
    """Sets a flag with a value. Returns its problems."""
    if name in ("--config-dir", "-cd"):
        folder = expand_home(value).resolve()
        if not folder.is_dir():
            return [f"--config-dir must be a folder with <group>/<choice>.yaml files; got {value} ({folder})."]
        line.config_dir = folder
        line.flags += ["--config-dir", str(folder)]
        return []
    if name in ("--cfg", "-c"):
        if value not in ("job", "hydra", "all"):
            return [f"--cfg must be job, hydra or all; got {value}."]
        line.shows_only = True
    line.flags += [name, value]
    return []


def _unknown_flag(name: str, equals: str, value: str) -> str:
    bare = name.lstrip("-").replace("-", "_")
    flags = sorted({*_WITH_VALUE, *_SWITCHES, "--help", "--version", "--info", "--hydra-help", "--shell-completion"})
    near = did_you_mean(name, [f for f in flags if f.startswith("--")])
    if near:
        return f"{name} is not a flag.{near}"
    return f"{name} is not a flag. Write settings without dashes: {bare}={value if equals else '...'}"
