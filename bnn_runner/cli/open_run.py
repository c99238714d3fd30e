"""Opens a finished run from the command line: the options that bnn-predict and bnn-prune share."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from bnn_runner.cli.spelling import apply_settings
from bnn_runner.errors import UserError, raise_all

if TYPE_CHECKING:
    from bnn_runner.api import Run

SHOWN = 10
"""Number of runs that a message lists."""


def add_run_options(parser: argparse.ArgumentParser) -> None:
    """Adds the options that select a run and say how to open it."""
    parser.add_argument("run", metavar="RUN", help="a run's folder, the beginning of its hash, or latest")
    parser.add_argument(
        "settings", nargs="*", metavar="KEY=VALUE", help="options, spelled as in bnn-run: output_dir=DIR"
    )
    parser.add_argument("--draws", type=int, metavar="S", help="number of posterior draws (default: that of the run)")
    parser.add_argument(
        "--output-dir", type=Path, default=Path("outputs"), metavar="DIR", help="folder of the runs (default: outputs)"
    )
    parser.add_argument("--data-dir", type=Path, metavar="DIR", help="folder of the run's data, if it has moved")
    parser.add_argument("--cache-dir", type=Path, metavar="DIR", help="folder of trained networks, if it has moved")
    parser.add_argument("--allow", default="", metavar="P,P", help="packages of your own classes to trust")
    parser.add_argument("--device", default="auto", choices=("auto", "cpu", "cuda", "mps"), help="default: auto")


SETTINGS = {n: n for n in ("output_dir", "data_dir", "cache_dir", "allow", "device")} | {"eval.num_draws": "draws"}
"""Options that may be written as settings of bnn-run: output_dir=x device=cpu."""


def read_options(
    parser: argparse.ArgumentParser, arguments: argparse.Namespace, more: Mapping[str, str] | None = None
) -> None:
    """Sets the options that are written as in bnn-run (output_dir=x).

    Args:
        parser: Parser of the command.
        arguments: Its parsed options; they are changed.
        more: Further {key: option} of the command.

    Raises:
        UserError: For a word that is no option of the command, and without a run.
    """
    words = [arguments.run, *arguments.settings]
    rest = apply_settings(parser, arguments, words, SETTINGS | dict(more or {}))
    if not rest:
        raise UserError("RUN is missing: give the folder of a run, the beginning of its hash, or latest.")
    known = ", ".join(f"{key}=" for key in sorted(SETTINGS | dict(more or {})))
    raise_all([f"{w!r} is not an option of {parser.prog}. Settings that it takes: {known}." for w in rest[1:]])
    arguments.run = rest[0]


def open_run(arguments: argparse.Namespace) -> tuple[Run, Path]:
    """Opens the run that these options select.

    Returns:
        The run and its folder.

    Raises:
        UserError: If there is no such run, or it uses classes that are not trusted.
    """
    if arguments.draws is not None and arguments.draws < 1:
        raise UserError(f"--draws must be at least 1; got {arguments.draws}.")
    folder = find_run(arguments.run, arguments.output_dir)
    from bnn_runner.api import load

    run = load(
        folder,
        allow=[name for name in arguments.allow.split(",") if name],
        device=arguments.device,
        data_dir=arguments.data_dir,
        cache_dir=arguments.cache_dir,
        quiet=True,
    )
    return run, folder


def find_run(name: str, output_dir: Path) -> Path:
    """Returns the folder of a finished run.

    Args:
        name: A folder, the beginning of a run's hash, or 'latest'.
        output_dir: The folder of the runs.

    Raises:
        UserError: If no run, or more than one, has this name.
    """
    if Path(name).is_dir():
        return Path(name)
    folders = [p.parent for p in output_dir.glob("runs/*/*/*/*/DONE")]
    if not folders:
        raise UserError(
            f"There are no finished runs under {output_dir / 'runs'}. Run bnn-run first, set --output-dir to "
            "the runs' output_dir, or give the folder of a run."
        )
    if name == "latest":
        return max(folders, key=lambda f: (f / "DONE").stat().st_mtime)
    start = name.rstrip("/")
    matches = [f for f in folders if f.name.startswith(start) or f.name.rpartition("-")[2].startswith(start)]
    if len(matches) == 1:
        return matches[0]
    listed = "".join(f"\n  {f}" for f in sorted(matches or folders)[:SHOWN])
    rest = f"\n  and {len(matches or folders) - SHOWN} more" if len(matches or folders) > SHOWN else ""
    if matches:
        raise UserError(f"{len(matches)} runs start with {name!r}. Give more of the hash:{listed}{rest}")
    raise UserError(
        f"There is no run {name!r} under {output_dir}. Give a folder, a hash, or latest. Runs:{listed}{rest}"
    )
