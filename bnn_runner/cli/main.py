"""`bnn-run`: check the command line, then hand it to Hydra; each job becomes one call of `runner.run`.

Exit codes: 0 all well, 1 a run failed, 2 a user's mistake, 130 interrupted. Hydra and torch are
imported only after the command line has been checked.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from bnn_runner import __version__
from bnn_runner.catalogue import did_you_mean
from bnn_runner.checking import Checked, check
from bnn_runner.errors import UserError
from bnn_runner.overrides import defer, expand, render

OK, FAILED, MISTAKE, INTERRUPTED = 0, 1, 2, 130

_WITH_VALUE = {"--config-dir", "-cd", "--package", "-p", "--cfg", "-c"}
_SWITCHES = {"--multirun", "-m", "--run", "-r", "--resolve", "--hydra-help", "--shell-completion", "-sc"}
_REFUSED = {
    "--config-path": "bnn-run's own configuration stays the primary one. Add your choices with --config-dir FOLDER.",
    "--config-name": "bnn-run's own configuration stays the primary one. Put your settings into an experiment file.",
    "--experimental-rerun": "bnn-run leaves command.txt in every cell: type what stands there to run the cell again.",
}
_REFUSED |= {"-cp": _REFUSED["--config-path"], "-cn": _REFUSED["--config-name"]}


@dataclass
class CommandLine:
    """A command line cut into overrides and flags; `flags` are what Hydra shall see."""

    overrides: list[str] = field(default_factory=list)
    flags: list[str] = field(default_factory=list)
    config_dir: Path | None = None
    multirun: bool = False
    help: bool = False
    version: bool = False
    shows_only: bool = False

    @property
    def config_dirs(self) -> list[Path]:
        return [self.config_dir] if self.config_dir else []


def main() -> None:
    """Entry point of `bnn-run`."""
    sys.exit(run(sys.argv[1:]))


def run(argv: Sequence[str]) -> int:
    """Run the command line; returns the exit code."""
    try:
        line = read_flags(argv)
        if line.version:
            print(f"bnn-run {__version__}")
            return OK
        if line.help:
            from bnn_runner.cli.help import help_text

            print(help_text(line.config_dirs))
            return OK
        checked = check(line.overrides, line.config_dirs, line.multirun)
        from bnn_runner.cli.launch import launch

        return launch(hydra_arguments(line, checked), checked, line)
    except UserError as error:
        tell_mistakes(error, "nothing was run")
        return MISTAKE
    except KeyboardInterrupt:
        print("\nbnn-run: interrupted. The same command, typed again, goes on from what is finished.", file=sys.stderr)
        return INTERRUPTED
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return OK


def tell_mistakes(error: UserError, consequence: str) -> None:
    """Print every problem, numbered, on standard error."""
    count = len(error.problems)
    print(f"bnn-run: {count} mistake{'s' if count != 1 else ''}, {consequence}", file=sys.stderr)
    for number, problem in enumerate(error.problems, 1):
        print(f"  {number}. {problem}", file=sys.stderr)


def read_flags(argv: Sequence[str]) -> CommandLine:
    """Tell flags from overrides. Raises `UserError` for flags that neither Hydra nor we know."""
    line = CommandLine()
    problems: list[str] = []
    words = list(argv)
    while words:
        word = words.pop(0)
        name, equals, value = word.partition("=")
        if not word.startswith("-") or word == "-":
            line.overrides.append(word)
        elif name in _REFUSED:
            problems.append(f"{name} is not offered. {_REFUSED[name]}")
            if not equals and words and not words[0].startswith("-"):
                words.pop(0)
        elif name in ("--help", "-h"):
            line.help = True
        elif name == "--version":
            line.version = True
        elif name in ("--info", "-i"):
            line.flags.append(word)
            line.shows_only = True
            if not equals and words and words[0] in _INFO:
                line.flags.append(words.pop(0))
        elif name in _WITH_VALUE:
            if not equals:
                if not words:
                    problems.append(f"{name} needs a value behind it, as in --config-dir FOLDER or --cfg job.")
                    continue
                value = words.pop(0)
            problems += _take(line, name, value)
        elif word in _SWITCHES:
            line.flags.append(word)
            line.multirun |= word in ("--multirun", "-m")
            line.shows_only |= word in ("--hydra-help", "--shell-completion", "-sc")
        else:
            problems.append(_unknown_flag(name, equals, value))
    if problems and not (line.help or line.version):
        raise UserError(*problems)
    return line


_INFO = ("all", "config", "defaults", "defaults-tree", "plugins", "searchpath")


def _take(line: CommandLine, name: str, value: str) -> list[str]:
    """A flag with its value; returns what is wrong with it."""
    if name in ("--config-dir", "-cd"):
        folder = Path(value).expanduser().resolve()
        if not folder.is_dir():
            return [
                f"--config-dir {value} is not a folder ({folder}). Give the folder that holds <group>/<choice>.yaml."
            ]
        line.config_dir = folder
        line.flags += ["--config-dir", str(folder)]
        return []
    if name in ("--cfg", "-c"):
        if value not in ("job", "hydra", "all"):
            return [f"--cfg {value} is not something to show. Write --cfg job, --cfg hydra or --cfg all."]
        line.shows_only = True
    line.flags += [name, value]
    return []


def _unknown_flag(name: str, equals: str, value: str) -> str:
    bare = name.lstrip("-")
    flags = sorted({*_WITH_VALUE, *_SWITCHES, "--help", "--version", "--info"})
    near = did_you_mean(name, [f for f in flags if f.startswith("--")])
    if near:
        return f"{name} is not a flag.{near}"
    return f"{name} is not a flag. Settings are written without dashes: {bare}={value if equals else '...'}"


def hydra_arguments(line: CommandLine, checked: Checked) -> list[str]:
    """Flags and overrides as Hydra shall see them."""
    if line.shows_only and not line.multirun:
        own = [o for o in checked.overrides if not o.key.startswith(("hydra.", "hydra/"))]
        rest = [render(o) for o in checked.overrides if o not in own]
        expanded, notes = expand([o.text for o in own], line.config_dirs)
        for note in notes:
            print(f"note: {note}", file=sys.stderr)
        return [*line.flags, *expanded, *rest]
    overrides = list(checked.overrides)
    brought = [o for o in overrides if o.text not in line.overrides]  # sweeps that an experiment file brings along
    extra = []
    if brought:
        if any(o.key == "hydra/sweeper" for o in overrides):
            overrides = [o for o in overrides if o not in brought]
        else:
            extra = ["hydra.sweeper.params=null"]
    return [*line.flags, *defer(overrides, checked.catalogue, checked.points), *extra]


if __name__ == "__main__":
    main()
