"""`bnn-report`: tables (CSV, Markdown, LaTeX, one HTML page) and figures of all runs under an output folder."""

from __future__ import annotations

import argparse
import functools
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from bnn_runner.cli.spelling import apply_settings, with_hyphens
from bnn_runner.errors import UserError, raise_all
from bnn_runner.report.axes import by_axes
from bnn_runner.report.columns import unknown
from bnn_runner.report.commands import missing_commands
from bnn_runner.report.drawing import attempt
from bnn_runner.report.filters import Filter, parse_filters, select
from bnn_runner.report.grid import to_csv as grids_to_csv
from bnn_runner.report.grid import without_empty
from bnn_runner.report.page import to_html
from bnn_runner.report.parallel_draw import draw_in_parallel
from bnn_runner.report.read_cells import CellRecord, find_cells
from bnn_runner.report.render import Report, report_of, to_csv, to_latex, to_markdown
from bnn_runner.report.section import Request, Section
from bnn_runner.report.sections import SECTIONS
from bnn_runner.report.selection import selected_by_validation
from bnn_runner.report.tables import Table, build
from bnn_runner.runtime.exit_codes import run_command
from bnn_runner.runtime.files import write_text
from bnn_runner.runtime.streams import accept_every_text

FORMATS = ("csv", "md", "tex", "html")
_SETTINGS = {n: n for n in ("output_dir", "name", "metrics", "rows", "columns", "summary", "format")} | {
    "metric": "metrics",
    "figures": "figure",
}
"""Options that may be written as settings of bnn-run: output_dir=x metric=[rmse] figures=false."""
_FILTERS = ("data", "model", "method")

_EXAMPLES = (
    ("", "everything under outputs/"),
    ("data=yacht --metrics rmse,marginal", "one data set, two metrics"),
    ("schedule.epochs=40 seed=0,1,2", "only runs of these settings"),
    ("--select method.rate", "of several dropout rates, the best on validation data"),
    ("--rows method --columns data", "methods as rows, data sets as columns, one table per metric"),
    *(section.example for section in SECTIONS if section.example),
    ("--metrics all --format csv", "every number, for your own analysis"),
)
_EPILOG = """examples:
{examples}

Entries are mean ± standard error over seeds. Seeds that are NaN, failed or missing are listed with the command that
runs them, and never averaged away; runs with different settings are never averaged.
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point; returns the exit code: 0, 2 for a usage error, 130 if it was interrupted."""
    accept_every_text()
    parser = _parser()
    arguments = parser.parse_intermixed_args(with_hyphens(sys.argv[1:] if argv is None else argv))

    def command() -> None:
        arguments.filters = apply_settings(parser, arguments, arguments.filters, _SETTINGS)
        report(arguments)

    return run_command("bnn-report", command)


def report(arguments: argparse.Namespace) -> list[Path]:
    """Read, aggregate, write, print. Returns the files written. Raises `UserError` for a usage error."""
    formats = _names(arguments.format)
    problems = [unknown("format", f, FORMATS, "--format") for f in formats if f not in FORMATS]
    if not arguments.name or Path(arguments.name).name != arguments.name:
        problems.append(f"--name must be a file name without slashes, as in --name mnist; got {arguments.name!r}.")
    raise_all(problems)
    filters = [Filter(w, tuple(_names(getattr(arguments, w)))) for w in _FILTERS if _names(getattr(arguments, w))]
    filters += parse_filters(arguments.filters, "The argument")
    cells = select(_cells(arguments.output_dir), filters)
    cells, selections = selected_by_validation(cells, fields) if (fields := _names(arguments.select)) else (cells, [])
    table = build(cells, arguments.metrics)
    table = replace(table, notes=[*table.notes, *selections])
    requests = _requests(table, cells, filters, arguments)
    page, commands = _main_tables(table, arguments), missing_commands(table)
    added = [without_empty(grid) for section, request in requests for grid in section.tables(request)]
    page = replace(page, grids=(*page.grids, *added))
    folder, name = arguments.output_dir / "results", arguments.name
    pictures: list[Path] = []
    notes: list[str] = []
    try:
        if arguments.figure and any(row.n for row in table.rows):
            pictures, notes = _figures(table, requests, folder, name)
        texts = {"csv": to_csv(table), "md": to_markdown(page), "tex": to_latex(page)}
        if "html" in formats:
            texts["html"] = to_html(page, name, pictures, commands, _figures_of_runs(table))
        files = {folder / f"{name}.{form}": texts[form] for form in formats}
        if "csv" in formats and len({*page.grids} - {*report_of(table, arguments.summary).grids}):
            files[folder / f"{name}_tables.csv"] = grids_to_csv(page.grids)
        for path, text in files.items():
            write_text(path, text)
    except OSError as error:
        raise UserError(
            f"Could not write to {folder}: {error.strerror or error}. Make it writable, or copy the runs to a writable "
            "folder and give it with --output-dir."
        ) from None
    missing = ["missing results:", *(f"  {c}" for c in commands), ""] if commands else []
    print(
        to_markdown(page),
        *missing,
        *(f"note: {note}" for note in notes),
        "wrote " + ", ".join(str(f) for f in (*files, *pictures)),
        sep="\n",
    )
    return [*files, *pictures]


def _figures(
    table: Table, requests: Sequence[tuple[Section, Request]], folder: Path, name: str
) -> tuple[list[Path], list[str]]:
    """Draws the figures. Returns their files, and a note for each that could not be drawn."""
    from bnn_runner.report.comparison import comparison_figure
    from bnn_runner.report.sweep_curves import sweep_curves

    notes: list[str] = []

    def here(drawing: Callable[[], Path | None], what: str = "of the table") -> Path | None:
        path, note = attempt(what, drawing)
        notes.extend([note] if note else [])
        return path

    folder.mkdir(parents=True, exist_ok=True)
    files = folder / f"{name}.png", folder / f"{name}_curves.png"
    drawn = draw_in_parallel([lambda: comparison_figure(table, files[0]), lambda: sweep_curves(table, files[1])], here)
    pictures = [path for path, there in zip(files, drawn, strict=True) if there]
    for section, request in requests:
        if section.figure is not None:
            path = folder / f"{name}_{section.name}.png"
            picture = here(functools.partial(section.figure, request, path), path.name)
            pictures += [] if picture is None else [picture]
    return pictures, list(dict.fromkeys(notes))


def _figures_of_runs(table: Table) -> dict[str, list[Path]]:
    """Figures of the first finished seed of each row."""
    cells = {row.name: next(iter(row.group.done.values())) for row in table.rows if row.n}
    found = {f"{name}, seed {c.seed}": sorted((c.path / "figures").glob("*.png")) for name, c in cells.items()}
    return {name: files for name, files in found.items() if files}


def _requests(
    table: Table, cells: Sequence[CellRecord], filters: Sequence[Filter], arguments: argparse.Namespace
) -> list[tuple[Section, Request]]:
    """The requested sections in their order, each with its request."""
    found = []
    for section in SECTIONS:
        value = getattr(arguments, section.name) if section.flag else True
        if value:
            text = value if isinstance(value, str) else ""
            found.append((section, Request(table, cells, filters, arguments.summary, text)))
    return found


def _main_tables(table: Table, arguments: argparse.Namespace) -> Report:
    """The table, by the requested axes."""
    page = report_of(table, arguments.summary)
    rows, columns = _names(arguments.rows), _names(arguments.columns)
    if rows or columns:
        rows = rows or [w for w in _FILTERS if w not in columns]
        page = replace(page, grids=by_axes(table, rows, columns, arguments.summary))
    return page


def _parser() -> argparse.ArgumentParser:
    examples = "\n".join(f"  bnn-report {words:<40} {meaning}" for words, meaning in _EXAMPLES)
    parser = argparse.ArgumentParser(
        prog="bnn-report",
        description=__doc__,
        epilog=_EPILOG.format(examples=examples),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "filters",
        nargs="*",
        metavar="FIELD=X,X",
        help="only runs with these values, as in data=yacht or model.norm=batch; options may be written so too: "
        "output_dir=DIR metric=[rmse]",
    )
    parser.add_argument(
        "--output-dir", type=Path, default=Path("outputs"), metavar="DIR", help="the output_dir of the runs (outputs)"
    )
    parser.add_argument("--name", default="comparison", help="name of the files in DIR/results (comparison)")
    parser.add_argument("--metrics", metavar="M,M", help="metrics to show, or all (default: the headline metrics)")
    parser.add_argument("--rows", metavar="F,F", help="fields as rows: data, seed, schedule, model.norm, ...")
    parser.add_argument("--columns", metavar="F,F", help="fields as columns, with one table per metric")
    parser.add_argument(
        "--select", metavar="F,F", help="of runs that differ only in these fields, the best on the validation part"
    )
    parser.add_argument(
        "--summary", choices=("mean", "median"), default="mean", help="mean ± standard error, or median [quartiles]"
    )
    for section in SECTIONS:
        if section.flag and section.metavar is None:
            parser.add_argument(section.flag, action="store_true", help=section.help)
        elif section.flag:
            parser.add_argument(section.flag, metavar=section.metavar, help=section.help)
    for what in _FILTERS:
        parser.add_argument(f"--{what}", metavar="X,X", help=f"only these choices of {what}")
    parser.add_argument("--format", default=",".join(FORMATS), metavar="F,F", help="formats: csv, md, tex, html (all)")
    parser.add_argument("--no-figure", dest="figure", action="store_false", help="no comparison figure")
    return parser


def _names(text: str | None) -> list[str]:
    return [name.strip() for name in (text or "").split(",") if name.strip()]


def _cells(output_dir: Path) -> list[CellRecord]:
    if not output_dir.is_dir():
        raise UserError(
            f"--output-dir must be the output_dir of finished runs; there is no folder {output_dir}. Run bnn-run "
            "first, or "
            "give another folder."
        )
    cells = find_cells(output_dir)
    if not cells:
        raise UserError(
            f"There are no runs in {output_dir / 'runs'}. Run bnn-run first, or give the output_dir of the runs with "
            "--output-dir."
        )
    return cells


if __name__ == "__main__":
    sys.exit(main())
