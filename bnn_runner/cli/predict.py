"""`bnn-predict RUN --data FILE`: predictions with uncertainty for new points, from a finished run."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from bnn_runner.cli.open_run import add_run_options, open_run, read_options
from bnn_runner.cli.spelling import with_hyphens
from bnn_runner.errors import UserError
from bnn_runner.runtime.exit_codes import run_command
from bnn_runner.runtime.streams import accept_every_text

if TYPE_CHECKING:
    import pandas as pd

SHOWN = 10
_EXAMPLES = (
    "RUN is a run's folder, the start of its hash, or: latest.\n\nexamples:\n  bnn-predict latest "
    "--data new.csv                      print the first predictions\n  bnn-predict 73562a9c --data "
    "new.csv --out table.csv    write all of them\n  bnn-predict "
    "outputs/runs/cifar10/resnet20/laplace/0-1b2c3d4e --data photos/ --out photos.csv\n\nColumns are "
    "matched by name where the data have names, else by position. Give inputs in their original "
    "units;\nthey are prepared as in the run. Regression: mean, standard deviation with its aleatoric "
    "and epistemic parts, and\nan interval. Classification: predicted label, probabilities, "
    "entropies. A saved posterior (save_posterior=true) is\nread; otherwise it is fitted again to the "
    "cached network.\n"
)


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point.

    Args:
        argv: The arguments; those of the process by default.

    Returns:
        The exit code: 0 success, 1 the posterior could not be fitted, 2 usage error, 130 interrupted.
    """
    accept_every_text()
    parser = _parser()
    arguments = parser.parse_intermixed_args(with_hyphens(sys.argv[1:] if argv is None else argv))

    def command() -> None:
        read_options(parser, arguments, {"level": "level", "out": "out"})
        predict(arguments)

    return run_command("bnn-predict", command)


def predict(arguments: argparse.Namespace) -> None:
    """Opens the run, reads the points, predicts, and prints or writes the table. Raises `UserError` on usage errors."""
    if not 0 < arguments.level < 1:
        raise UserError(f"--level must be between 0 and 1, as in 0.95; got {arguments.level:g}.")
    run, folder = open_run(arguments)
    from bnn_runner.runs.new_points import read_points

    _note(f"{run.data} · {run.model} · {run.method} · seed {run.seed} ({folder})")
    points = read_points(arguments.data, run.saved_task or run.task)
    for note in points.notes:
        _note(f"note: {note}")
    _note(f"posterior: {_SOURCES[run.posterior_source]}")
    table = points.all_rows(run.predictor(arguments.draws).table(points.points, arguments.level))
    table.insert(0, points.label_name, list(points.labels))
    if arguments.out is None:
        _show(table)
        return
    _write(table, arguments.out)
    _note(f"wrote {len(table)} predictions to {arguments.out}")


_SOURCES = {
    "saved": "read from the run",
    "fitted again": "fitted again to the cached network (save_posterior=true saves it)",
}


def _note(text: str) -> None:
    print(text, file=sys.stderr)


def _show(table: pd.DataFrame) -> None:
    """Prints the first rows, with four digits."""
    print(table.head(SHOWN).to_string(index=False, float_format=lambda v: f"{v:.4g}"), flush=True)
    if len(table) > SHOWN:
        print(f"... {len(table)} rows in total; --out FILE.csv writes all of them", flush=True)


def _write(table: pd.DataFrame, path: Path) -> None:
    from bnn_runner.runtime.files import write_text

    try:
        write_text(path, table.to_csv(index=False, lineterminator="\n"))
    except OSError as error:
        raise UserError(f"Could not write {path} ({error.strerror or error}). Give another file with --out.") from None


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="bnn-predict", description=__doc__, epilog=_EXAMPLES, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add_run_options(parser)
    parser.add_argument(
        "--data", type=Path, required=True, metavar="FILE", help="a table (.csv), .npz with x, an image, or a folder"
    )
    parser.add_argument("--out", type=Path, metavar="CSV", help="write the table here (default: print its first rows)")
    parser.add_argument("--level", type=float, default=0.95, metavar="P", help="probability of the interval (0.95)")
    return parser


if __name__ == "__main__":
    sys.exit(main())
