"""`bnn-report`: every cell under an output folder to one table (CSV, Markdown, LaTeX) and a comparison figure."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from bnn_runner.errors import UserError, raise_all
from bnn_runner.report.cells import Cell, find_cells
from bnn_runner.report.columns import unknown
from bnn_runner.report.render import to_csv, to_latex, to_markdown
from bnn_runner.report.tables import Table, build

FORMATS = {"csv": to_csv, "md": to_markdown, "tex": to_latex}
_FILTERS = ("data", "model", "method")

_EXAMPLES = """examples:
  bnn-report                                          everything under outputs/
  bnn-report --data yacht --metrics rmse,marginal     one data set, two metrics
  bnn-report --metrics all --format csv               every number, for your own analysis

Mean ± standard error over seeds. A seed that is NaN, failed or missing is shown, never averaged away.
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point; returns the exit code: 0, or 2 for a user's mistake."""
    arguments = _parser().parse_args(argv)
    try:
        report(arguments)
    except UserError as error:
        for problem in error.problems:
            print(f"bnn-report: {problem}", file=sys.stderr)
        return 2
    return 0


def report(arguments: argparse.Namespace) -> list[Path]:
    """Read, aggregate, write, print. Returns the files written. Raises `UserError` for a user's mistake."""
    formats = _names(arguments.format)
    problems = [unknown("format", f, FORMATS, "--format") for f in formats if f not in FORMATS]
    if not arguments.name or Path(arguments.name).name != arguments.name:
        problems.append(f"--name {arguments.name!r} is no file name. Give a word without slashes, as in --name mnist.")
    raise_all(problems)
    cells = _select(_cells(arguments.output_dir), arguments)
    table = build(cells, arguments.metrics)
    folder = arguments.output_dir / "results"
    files = _write(table, folder, arguments.name, formats)
    if arguments.figure and any(row.n for row in table.rows):
        from bnn_runner.report.comparison import comparison_figure

        files.append(comparison_figure(table, folder / f"{arguments.name}.png"))
    _show(to_markdown(table), "wrote " + ", ".join(str(f) for f in files))
    return files


def _show(*texts: str) -> None:
    try:
        print(*texts, sep="\n", flush=True)
    except BrokenPipeError:  # `bnn-report | head`: the files are written, nobody reads on
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="bnn-report", description=__doc__, epilog=_EXAMPLES, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--output-dir", type=Path, default=Path("outputs"), metavar="DIR", help="the output_dir of the runs (outputs)"
    )
    parser.add_argument("--name", default="comparison", help="name of the files under DIR/results (comparison)")
    parser.add_argument("--metrics", metavar="M,M", help="metrics to show, or all; the headline metrics unless given")
    for what in _FILTERS:
        parser.add_argument(f"--{what}", metavar="X,X", help=f"only these choices of {what}")
    parser.add_argument("--format", default="csv,md,tex", metavar="F,F", help="of csv, md, tex (all)")
    parser.add_argument("--no-figure", dest="figure", action="store_false", help="no comparison figure")
    return parser


def _names(text: str | None) -> list[str]:
    return [name.strip() for name in (text or "").split(",") if name.strip()]


def _cells(output_dir: Path) -> list[Cell]:
    if not output_dir.is_dir():
        raise UserError(
            f"There is no folder {output_dir}. Reports are made of finished runs. Run bnn-run first, or name the runs' "
            "output_dir with --output-dir."
        )
    cells = find_cells(output_dir)
    if not cells:
        raise UserError(
            f"There are no runs under {output_dir / 'runs'}. Run bnn-run first, or name the runs' output_dir with "
            "--output-dir."
        )
    return cells


def _select(cells: list[Cell], arguments: argparse.Namespace) -> list[Cell]:
    problems = []
    chosen = cells
    for what in _FILTERS:
        wanted = _names(getattr(arguments, what))
        if not wanted:
            continue
        known = {getattr(cell, what) for cell in cells}
        problems += [unknown(what, name, known, f"--{what}") for name in wanted if name not in known]
        chosen = [cell for cell in chosen if getattr(cell, what) in wanted]
    raise_all(problems)
    if not chosen:
        raise UserError("No cell is left: each filter matches some, together they match none. Drop one of the filters.")
    return chosen


def _write(table: Table, folder: Path, name: str, formats: Sequence[str]) -> list[Path]:
    files = []
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for form in formats:
            path = folder / f"{name}.{form}"
            unfinished = path.with_name(f".{path.name}.tmp")
            unfinished.write_text(FORMATS[form](table), encoding="utf-8")
            unfinished.replace(path)
            files.append(path)
    except OSError as error:
        raise UserError(
            f"Cannot write under {folder} ({error.strerror or error}). Reports are kept there. Make it writable, or "
            "copy the runs to a folder that is and name it with --output-dir."
        ) from None
    return files


if __name__ == "__main__":
    sys.exit(main())
