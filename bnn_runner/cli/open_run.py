"""Opening a finished run from the command line: what bnn-predict and bnn-prune share."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from bnn_runner.errors import UserError

if TYPE_CHECKING:
    from bnn_runner.api import Run

SHOWN = 10
"""Runs that a message lists."""


def add_run_options(parser: argparse.ArgumentParser) -> None:
    """The options that say which run, where it lies, and how it is opened."""
    parser.add_argument("run", metavar="RUN", help="a run's folder, the beginning of its hash, or latest")
    parser.add_argument("--draws", type=int, metavar="S", help="posterior draws (as many as the run scored)")
    parser.add_argument(
        "--output-dir", type=Path, default=Path("outputs"), metavar="DIR", help="the folder of the runs (outputs)"
    )
    parser.add_argument("--data-dir", type=Path, metavar="DIR", help="the folder of the run's data, if it has moved")
    parser.add_argument("--cache-dir", type=Path, metavar="DIR", help="the folder of trained networks, if it has moved")
    parser.add_argument("--allow", default="", metavar="P,P", help="trusted packages of the run's own classes")
    parser.add_argument("--device", default="auto", choices=("auto", "cpu", "cuda", "mps"), help="(auto)")


def open_run(arguments: argparse.Namespace) -> tuple[Run, Path]:
    """The run that these options name, and its folder. Raises `UserError` where there is none, or it is refused."""
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
    """The folder of a finished run: a folder, the beginning of a hash, or "latest". Raises `UserError`."""
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
    wanted = name.rstrip("/")
    found = [f for f in folders if f.name.startswith(wanted) or f.name.rpartition("-")[2].startswith(wanted)]
    if len(found) == 1:
        return found[0]
    listed = "".join(f"\n  {f}" for f in sorted(found or folders)[:SHOWN])
    rest = f"\n  and {len(found or folders) - SHOWN} more" if len(found or folders) > SHOWN else ""
    if found:
        raise UserError(f"{len(found)} runs start with {name!r}. Give more of the hash:{listed}{rest}")
    raise UserError(
        f"There is no run {name!r} under {output_dir}. Give a folder, a hash, or latest. Runs:{listed}{rest}"
    )
