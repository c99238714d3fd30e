"""`bnn-report`: every cell under an output folder to tables (CSV, Markdown, LaTeX, one HTML page) and a figure."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from bnn_runner.errors import UserError, raise_all
from bnn_runner.report.axes import by_axes
from bnn_runner.report.columns import unknown
from bnn_runner.report.commands import missing_commands
from bnn_runner.report.cost import cost_figure, cost_grids, costs
from bnn_runner.report.equivalents import ensemble_equivalents
from bnn_runner.report.evidence import evidence_figure, evidence_grids, rankings
from bnn_runner.report.filters import Filter, parse_filters, select
from bnn_runner.report.grid import to_csv as grids_to_csv
from bnn_runner.report.page import to_html
from bnn_runner.report.paired import paired_differences, without_extra
from bnn_runner.report.parallel_draw import side_by_side
from bnn_runner.report.published import beside_published
from bnn_runner.report.ranks import mean_ranks
from bnn_runner.report.read_cells import CellRecord, find_cells
from bnn_runner.report.render import LEGENDS, Report, report_of, to_csv, to_latex, to_markdown
from bnn_runner.report.tables import Table, build
from bnn_runner.runtime.files import write_text

FORMATS = ("csv", "md", "tex", "html")
_FILTERS = ("data", "model", "method")

_EXAMPLES = """examples:
  bnn-report                                          everything under outputs/
  bnn-report data=yacht --metrics rmse,marginal       one data set, two metrics
  bnn-report schedule.epochs=40 seed=0,1,2            only runs of these settings
  bnn-report --rows method --columns data             methods down, data sets across, a table for each metric
  bnn-report --baseline method=map                    also differences from MAP, seed by seed
  bnn-report --ranks --summary median                 also mean ranks over data sets; medians and quartiles
  bnn-report --evidence                               also ranked by evidence, beside the test log-likelihood
  bnn-report --cost                                   also seconds after the training against log-likelihood
  bnn-report experiment=uci_mc_dropout                an experiment's runs, and beside the published values
  bnn-report --metrics all --format csv               every number, for your own analysis

Mean ± standard error over seeds. A seed that is NaN, failed or missing is shown with the command that would make it,
never averaged away; runs that differ in a setting are never averaged with one another.
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
    filters = [Filter(w, tuple(_names(getattr(arguments, w)))) for w in _FILTERS if _names(getattr(arguments, w))]
    filters += parse_filters(arguments.filters, "The word")
    cells = select(_cells(arguments.output_dir), filters)
    table = build(cells, arguments.metrics)
    made, commands = _report(table, arguments), missing_commands(table)
    for experiment in (f.values[0] for f in filters if f.name == "experiment" and len(f.values) == 1):
        beside = beside_published(cells, experiment)
        made = made if beside is None else replace(made, grids=(*made.grids, beside))
    folder, name = arguments.output_dir / "results", arguments.name
    pictures: list[Path] = []
    try:
        if arguments.figure and any(row.n for row in table.rows):
            pictures = _figures(table, folder, name)
            if arguments.evidence:
                pictures.append(evidence_figure(rankings(table), folder / f"{name}_evidence.png"))
            if arguments.cost:
                pictures.append(cost_figure(costs(table), folder / f"{name}_cost.png"))
        texts = {"csv": to_csv(table), "md": to_markdown(made), "tex": to_latex(made)}
        if "html" in formats:
            texts["html"] = to_html(made, name, pictures, commands, _figures_of_runs(table))
        files = {folder / f"{name}.{form}": texts[form] for form in formats}
        if "csv" in formats and len({*made.grids} - {*report_of(table, arguments.summary).grids}):
            files[folder / f"{name}_tables.csv"] = grids_to_csv(made.grids)
        for path, text in files.items():
            write_text(path, text)
    except OSError as error:
        raise UserError(
            f"Cannot write under {folder} ({error.strerror or error}). Reports are kept there. Make it writable, or "
            "copy the runs to a folder that is and name it with --output-dir."
        ) from None
    missing = ["what is missing:", *(f"  {c}" for c in commands), ""] if commands else []
    _show(to_markdown(made), *missing, "wrote " + ", ".join(str(f) for f in (*files, *pictures)))
    return [*files, *pictures]


def _figures(table: Table, folder: Path, name: str) -> list[Path]:
    from bnn_runner.report.comparison import comparison_figure
    from bnn_runner.report.sweep_curves import sweep_curves

    folder.mkdir(parents=True, exist_ok=True)
    files = folder / f"{name}.png", folder / f"{name}_curves.png"
    drawn = side_by_side([lambda: comparison_figure(table, files[0]), lambda: sweep_curves(table, files[1])])
    return [path for path, there in zip(files, drawn, strict=True) if there]


def _figures_of_runs(table: Table) -> dict[str, list[Path]]:
    """By row, those of its first finished seed."""
    cells = {row.name: next(iter(row.group.done.values())) for row in table.rows if row.n}
    found = {f"{name}, seed {c.seed}": sorted((c.path / "figures").glob("*.png")) for name, c in cells.items()}
    return {name: files for name, files in found.items() if files}


def _report(table: Table, arguments: argparse.Namespace) -> Report:
    """The table, by the axes asked for, and what is asked for beside it."""
    made = report_of(table, arguments.summary)
    rows, columns = _names(arguments.rows), _names(arguments.columns)
    if rows or columns:
        rows = rows or [w for w in _FILTERS if w not in columns]
        made = replace(made, grids=by_axes(table, rows, columns, arguments.summary), legend=LEGENDS[arguments.summary])
    if arguments.baseline:
        baseline = parse_filters(arguments.baseline.split(), "--baseline")
        differences = paired_differences(table, baseline, arguments.summary)
        made = replace(made, grids=(*made.grids, without_extra(differences)))
    added = [mean_ranks(table)] if arguments.ranks else []
    added += [without_extra(ensemble_equivalents(table))] if arguments.equivalents else []
    added += evidence_grids(rankings(table)) if arguments.evidence else []
    added += cost_grids(costs(table)) if arguments.cost else []
    return replace(made, grids=(*made.grids, *added))


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
        "filters",
        nargs="*",
        metavar="FIELD=X,X",
        help="only runs with these values, as in data=yacht or model.norm=batch",
    )
    parser.add_argument(
        "--output-dir", type=Path, default=Path("outputs"), metavar="DIR", help="the output_dir of the runs (outputs)"
    )
    parser.add_argument("--name", default="comparison", help="name of the files under DIR/results (comparison)")
    parser.add_argument("--metrics", metavar="M,M", help="metrics to show, or all; the headline metrics unless given")
    parser.add_argument(
        "--rows", metavar="F,F", help="fields that make the rows: data, seed, schedule, model.norm, ..."
    )
    parser.add_argument("--columns", metavar="F,F", help="fields that make the columns, a table for each metric")
    parser.add_argument(
        "--summary", choices=("mean", "median"), default="mean", help="mean ± s.e., or median [quartiles]"
    )
    parser.add_argument("--baseline", metavar="'F=X ...'", help="also paired differences from these runs: method=map")
    parser.add_argument("--ranks", action="store_true", help="also mean ranks over data sets")
    parser.add_argument("--equivalents", action="store_true", help="also the ensemble size that each method is worth")
    parser.add_argument("--evidence", action="store_true", help="also rows ranked by log evidence, with a figure")
    parser.add_argument("--cost", action="store_true", help="also seconds against log-likelihood, with a figure")
    for what in _FILTERS:
        parser.add_argument(f"--{what}", metavar="X,X", help=f"only these choices of {what}")
    parser.add_argument("--format", default=",".join(FORMATS), metavar="F,F", help="of csv, md, tex, html (all)")
    parser.add_argument("--no-figure", dest="figure", action="store_false", help="no comparison figure")
    return parser


def _names(text: str | None) -> list[str]:
    return [name.strip() for name in (text or "").split(",") if name.strip()]


def _cells(output_dir: Path) -> list[CellRecord]:
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


if __name__ == "__main__":
    sys.exit(main())
