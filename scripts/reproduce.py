"""Reproduces the talks' tables and figures and compares them with the published numbers.

    python scripts/reproduce.py                              list the presets and what they cost
    python scripts/reproduce.py mnist_methods                one preset, at the size for two CPU cores
    python scripts/reproduce.py --all                        every preset
    python scripts/reproduce.py --all --size medium          every preset that has a size for a night
    python scripts/reproduce.py uci_methods --size paper     with the published settings
    python scripts/reproduce.py uci_methods data=yacht       a part of it: further words are passed to bnn-run
    python scripts/reproduce.py uci_methods --check          run it and compare with the kept table

A preset is an experiment of conf/experiment/ or a script that makes figures; presets.yaml lists them. Runs go to
--output, one folder per preset; all presets share one folder of trained networks. Finished runs are not repeated, so
the same command resumes after an interruption. Tables and figures go to --results: the output of bnn-report, what the
size does and does not show, and the origin of the numbers. Several presets run two at a time on two cores (--jobs), the
longest first, and each prints to reproduce.log in its folder. A single preset runs two jobs of its sweep at a time.
"""

from __future__ import annotations

import argparse
import csv
import json
import math
import os
import shlex
import shutil
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from bnn_runner.config.where_rules import SIZES
from bnn_runner.report.claims import HEADING, Claim, claim_lines
from bnn_runner.report.grouping import ABSENT, distinguishing_fields, group_cells, key_of
from bnn_runner.report.read_cells import CellRecord, find_cells
from bnn_runner.report.selection import selected_by_validation
from bnn_runner.runtime.files import write_text

HERE = Path(__file__).resolve().parent
RESULTS = HERE.parent / "outputs" / "results"
STOPPED = {128 + signal.SIGINT, 128 + signal.SIGTERM}
"""Exit codes of an interrupted program: no table is made from half a sweep."""
_DRAWING = threading.Lock()
"""matplotlib is not thread-safe."""


@dataclass(frozen=True)
class Preset:
    """One entry of presets.yaml.

    Args:
        name: Name of the preset, and of its kept table.
        item: Its number in the list of the talks' tables.
        what: Title of the table.
        minutes: Cost of each size in minutes, or what the size needs.
        run: Command lines for bnn-run.
        script: Command line of a script in this folder, instead of `run`.
        report: Options for bnn-report.
        figures: Glob pattern of the report's figures that are kept.
        pictures: Glob pattern of a figure of the runs; those of the first seed of each row are combined into one.
        after: Command line of a program that works on the newest run, before the report.
        keep: Glob pattern of the files that `after` writes into the run; they are kept with the table.
        shows: What the small size is, and what it does not show; no statement about the numbers.
        claims: Statements about the numbers, which are checked (`bnn_runner.report.claims`).
        files: Glob pattern of kept files whose names do not start with the preset's.
        check: Columns of the kept table, each with the relative difference that another machine may show.
    """

    name: str
    item: str
    what: str
    minutes: Mapping[str, Any]
    run: Sequence[str] = ()
    script: str = ""
    report: str = ""
    figures: str = "*.png"
    pictures: str = ""
    after: str = ""
    keep: str = ""
    shows: str = ""
    claims: Sequence[Mapping[str, Any]] = ()
    files: str = ""
    check: Mapping[str, float] | None = None


def presets() -> dict[str, Preset]:
    found = yaml.safe_load((HERE / "presets.yaml").read_text(encoding="utf-8"))
    return {entry["name"]: Preset(**entry) for entry in found}


@dataclass(frozen=True)
class Place:
    """Where and how presets are made.

    Args:
        output: Folder of the runs.
        results: Folder of the tables and figures.
        size: one of `SIZES`.
        words: Further overrides for bnn-run.
        jobs: Jobs of one sweep that run at a time.
        threads: Threads of one job; None leaves the default.
        runs: Whether to run anything, or only to make tables of finished runs.
        logged: Whether output goes to reproduce.log in the preset's folder.
    """

    output: Path
    results: Path
    size: str = "small"
    words: Sequence[str] = ()
    jobs: int = 1
    threads: int | None = None
    runs: bool = True
    logged: bool = False

    def folder(self, preset: Preset) -> Path:
        return self.output / (preset.name if self.size == "small" else f"{preset.name}_{self.size}")

    def call(self, words: Sequence[str], folder: Path, alone: bool = False) -> int:
        """Run a program and return its exit code. `alone`: a single job, which may use all of our cores."""
        threads = self.jobs * (self.threads or 1) if alone else self.threads
        environment = os.environ | ({} if threads is None else {"OMP_NUM_THREADS": str(threads)})
        if not self.logged:
            print("+ " + shlex.join(words), flush=True)
            return exit_code(subprocess.run(words, check=False, env=environment))
        folder.mkdir(parents=True, exist_ok=True)
        with (folder / "reproduce.log").open("a", encoding="utf-8") as log:
            log.write("+ " + shlex.join(words) + "\n")
            log.flush()
            return exit_code(subprocess.run(words, check=False, env=environment, stdout=log, stderr=log))


def exit_code(ended: subprocess.CompletedProcess[bytes]) -> int:
    """As a shell reports it: 128 plus the signal's number if a signal ended the program."""
    return ended.returncode if ended.returncode >= 0 else 128 - ended.returncode


def make(preset: Preset, place: Place) -> int:
    """Run a preset, write its table and figures, and return the exit code."""
    folder, results = place.folder(preset), place.results
    if preset.script:
        line = preset.script.format(results=results, output=folder, jobs=place.jobs)
        words = [sys.executable, str(HERE / line.split()[0]), *shlex.split(line)[1:], *place.words]
        return place.call(words, folder)
    code = 0
    places = [f"output_dir={folder}", f"cache_dir={place.output / 'cache'}"]
    for line in preset.run if place.runs else ():
        chosen = [f"size={place.size}"] if place.size != "small" else []
        sweep = line.startswith("-m")
        if place.jobs > 1 and sweep and not any(w.startswith("hydra/launcher=") for w in place.words):
            chosen += ["hydra/launcher=workers", f"hydra.launcher.n_jobs={place.jobs}"]
        program = [sys.executable, "-m", "bnn_runner.cli.main"]
        words = [*program, *line.split(), *chosen, *place.words, *places]
        ended = place.call(words, folder, alone=not sweep)
        if ended in STOPPED:
            return ended
        code = max(code, ended)
    cells = [c for c in find_cells(folder) if c.status == "done"] if folder.exists() else []
    experiments = sorted({c.choices["experiment"] for c in cells if "experiment" in c.choices})
    if not experiments:
        return code or 1
    name = folder.name
    if preset.after:
        tool, *rest = preset.after.split()
        words = [sys.executable, "-m", f"bnn_runner.cli.{tool}", *rest, "--output-dir", str(folder)]
        ended = place.call(words, folder, alone=True)
        newest = max(cells, key=lambda c: (c.path / "DONE").stat().st_mtime)
        results.mkdir(parents=True, exist_ok=True)
        for path in newest.path.glob(preset.keep) if ended == 0 else ():
            shutil.copy(path, results / f"{name}_{path.name}")
        code = max(code, ended)
    named = f"experiment={','.join(experiments)}"
    reported = [named, "--output-dir", str(folder), "--name", name, *shlex.split(preset.report)]
    code = max(code, place.call([sys.executable, "-m", "bnn_runner.cli.report", *reported], folder))
    for path in (folder / "results").glob(f"{name}*"):
        if path.suffix == ".csv" or path.match(preset.figures):
            results.mkdir(parents=True, exist_ok=True)
            shutil.copy(path, results / path.name)
    if preset.pictures:
        with _DRAWING:
            montage(_selected(cells, preset.report), preset.pictures, results / f"{name}_pictures.png")
    made = folder / "results" / f"{name}.md"
    if made.exists():
        sized = ["--size", place.size] if place.size != "small" else []
        command = ["python", "scripts/reproduce.py", preset.name, *sized, *place.words]
        report = made.read_text(encoding="utf-8").replace(str(place.output), "outputs/reproduce")
        if data := os.environ.get("BNN_DATA_DIR"):
            report = report.replace(data, "DATA")
        text = [f"# {preset.what}", "", report, preset.shows.strip(), "", *checked(preset, cells)]
        write_text(results / f"{name}.md", "\n".join([*text, f"`{shlex.join(command)}`: {origin(cells)}."]) + "\n")
    return code


def _selected(cells: Sequence[CellRecord], report: str) -> Sequence[CellRecord]:
    """The cells that the report's --select keeps; all cells without it."""
    words = shlex.split(report)
    if "--select" not in words:
        return cells
    return selected_by_validation(cells, words[words.index("--select") + 1].split(","))[0]


def checked(preset: Preset, cells: Sequence[CellRecord]) -> list[str]:
    """The preset's claims with their outcomes, as lines of Markdown; on the runs that the report selects."""
    if not preset.claims:
        return []
    lines = claim_lines(_selected(cells, preset.report), [Claim(**claim) for claim in preset.claims])
    return [HEADING, "", *(f"- {line}" for line in lines), ""]


def montage(cells: Sequence[CellRecord], picture: str, path: Path) -> None:
    """Combine a figure of the runs, given by a glob pattern, for the first seed of every row of the table.

    Figures keep their own size, at which their text is readable, in rows as wide as a page. Each names its run in its
    title; what else distinguishes the row is written above it.
    """
    from matplotlib.figure import Figure
    from matplotlib.image import imread

    from bnn_runner.report import style

    groups, _ = group_cells(cells)
    extra = distinguishing_fields(groups)
    lines: list[list[tuple[str, Any, float, float]]] = []  # settings, pixels, width and height in inches
    for i, group in enumerate(groups):
        if group.done and (files := sorted((next(iter(group.done.values())).path / "figures").glob(picture))):
            pixels = imread(files[0])
            settings = [f"{k.split('.')[-1]}={texts[i]}" for k, texts in extra.items() if texts[i] != ABSENT]
            high, wide = (side / style.DOTS_PER_INCH for side in pixels.shape[:2])
            if not lines or sum(w for _, _, w, _ in lines[-1]) + wide > style.MOST_WIDTH:
                lines.append([])
            lines[-1].append((" ".join(settings), pixels, wide, high))
    if not lines:
        return
    above = 0.25 if any(settings for line in lines for settings, *_ in line) else 0.0
    width = max(sum(w for _, _, w, _ in line) for line in lines)
    height = sum(above + max(h for *_, h in line) for line in lines)
    figure, top = Figure(figsize=(width, height)), height
    for line in lines:
        left = 0.0
        for settings, pixels, wide, high in line:
            ax = figure.add_axes((left / width, (top - above - high) / height, wide / width, high / height))
            ax.set_axis_off()
            ax.imshow(pixels, aspect="auto")
            if settings:
                where = ((left + wide / 2) / width, (top - 0.05) / height)
                figure.text(*where, textwrap.shorten(settings, round(wide / 0.075)), fontsize=9, ha="center", va="top")
            left += wide
        top -= above + max(h for *_, h in line)
    style.save(figure, path)


def origin(cells: Sequence[CellRecord]) -> str:
    """Cost of the cells, and their machine, versions and day. Cells that were trained together count once."""
    training: dict[object, float] = {}
    rest, machines, versions, days = 0.0, set(), set(), []
    for cell in cells:
        facts = json.loads((cell.path / "provenance.json").read_text(encoding="utf-8"))
        key = key_of(cell)
        training[key] = max(training.get(key, 0.0), facts["seconds"].get("training", 0.0))
        rest += sum(seconds for stage, seconds in facts["seconds"].items() if stage != "training")
        machines.add(f"{facts['threads']} thread{'s' * (facts['threads'] > 1)}, {facts['device']}")
        commit = (facts.get("git") or {}).get("commit", "")[:8] or "installed"
        versions.add(f"torch {facts['versions']['torch']}, bnn_runner {facts['versions']['bnn_runner']} ({commit})")
        days.append(facts["finished"][:10])
    cost = f"{len(cells)} cells, training {sum(training.values()) / 60:.1f} min, the rest {rest / 60:.1f} min"
    return f"{cost} ({'; '.join(sorted(machines))}; {'; '.join(sorted(versions))}; {max(days)})"


def differences(shares: Mapping[str, float], made: Path, kept: Path) -> list[str]:
    """Values that differ from the kept table by more than these relative differences, column by column."""
    new, old = _lines(made), _lines(kept)
    problems = [f"{'/'.join(key)} is in only one of the two tables" for key in sorted(new.keys() ^ old.keys())]
    for key in new.keys() & old.keys():
        for column, share in shares.items():
            a, b = (_number(table[key], column) for table in (new, old))
            if math.isnan(a) != math.isnan(b) or abs(a - b) > share * abs(b):
                problems.append(f"{'/'.join(key)}: {column} is {a:.4g}, was {b:.4g} (may differ by {share:.0%})")
    return problems


def _lines(path: Path) -> dict[tuple[str, ...], dict[str, str]]:
    """Rows by key: the columns before the kind of task in a table of bnn-report, else all columns of text."""
    with path.open(encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))
    names = list(rows[0])
    if "kind" in names:
        names = names[: names.index("kind")]
    else:
        names = [name for name in names if all(math.isnan(_number(row, name)) for row in rows)]
    return {tuple(row[name] for name in names): row for row in rows}


def _number(row: Mapping[str, str], column: str) -> float:
    try:
        return float(row.get(f"{column}_mean", row.get(column, "")))
    except ValueError:
        return math.nan


def minutes(preset: Preset, size: str = "small") -> float:
    """Minutes of one core; infinite if the preset states them in words."""
    value = preset.minutes.get(size, "")
    return float(value) if isinstance(value, int | float) else math.inf


def listing(found: Mapping[str, Preset]) -> str:
    lines = [f"{'preset':<24}{'item':<6}{'small':>9}{'medium':>10}   {'paper':<22}what"]
    for p in found.values():
        costs = {size: f"{v} min" if isinstance(v, int | float) else str(v) for size, v in p.minutes.items()}
        small, medium, paper = (costs.get(size, "") for size in SIZES)
        lines.append(f"{p.name:<24}{p.item:<6}{small:>9}{medium:>10}   {paper:<22}{p.what}")
    total = sum(minutes(p) for p in found.values())
    note = f"Minutes are for one core. --all at the small size takes {total:.0f}, or {total / 2:.0f} on two cores."
    return "\n".join([*lines, note])


def compared(preset: Preset, made: Path, kept: Path) -> int:
    """Print the values that differ from the kept table; returns 1 if there are any."""
    if not preset.check:
        return 0
    new, old = (folder / f"{preset.name}.csv" for folder in (made, kept))
    if missing := [path for path in (new, old) if not path.exists()]:
        print(f"{preset.name}: nothing to compare: {missing[0].name} is missing in {missing[0].parent.name}/")
        return 1
    problems = differences(preset.check, new, old)
    print("\n".join([f"{preset.name}: {len(problems)} values differ from the kept table", *problems]))
    return int(bool(problems))


def main() -> int:
    found = presets()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("words", nargs="*", help="presets, and overrides for bnn-run")
    parser.add_argument("--all", action="store_true", help="every preset")
    parser.add_argument("--size", choices=SIZES, default="small")
    parser.add_argument("--output", type=Path, default=Path("outputs/reproduce"), help="folder of the runs")
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder of the tables and figures")
    both = "presets at a time, or jobs at a time of a single preset's sweep; they share the cores"
    parser.add_argument("--jobs", type=int, default=min(2, os.cpu_count() or 1), help=both)
    parser.add_argument("--no-run", dest="run", action="store_false", help="only make tables of finished runs")
    parser.add_argument("--check", action="store_true", help="compare with the kept table; --results is not changed")
    arguments = parser.parse_intermixed_args()
    chosen = [w for w in arguments.words if "=" not in w]
    words = [w for w in arguments.words if "=" in w]
    unknown = sorted(set(chosen) - set(found))
    if unknown:
        parser.error(f"unknown preset: {', '.join(unknown)}. The presets: {', '.join(found)}.")
    if arguments.jobs < 1:
        parser.error(f"--jobs must be at least 1; got {arguments.jobs}.")
    if arguments.all:
        sized = [name for name in found if arguments.size in found[name].minutes]
        chosen = sorted(sized, key=lambda name: -minutes(found[name], arguments.size))
    if without := [name for name in chosen if arguments.size not in found[name].minutes]:
        parser.error(f"--size {arguments.size} is not defined for {', '.join(without)}.")
    if not chosen:
        print(listing(found))
        return 0
    output, several = arguments.output.absolute(), len(chosen) > 1
    place = Place(
        output,
        output / "checked" if arguments.check else arguments.results.absolute(),
        arguments.size,
        words,
        1 if several else arguments.jobs,
        max(1, (os.cpu_count() or 1) // arguments.jobs) if arguments.jobs > 1 else None,
        arguments.run,
        several,
    )
    begun = time.perf_counter()

    def one(name: str) -> int:
        start = time.perf_counter()
        code = make(found[name], place)
        log = arguments.output / place.folder(found[name]).name / "reproduce.log"
        ended = "" if code == 0 or not several else f", exit code {code}: see {log}"
        ended = ", interrupted" if code in STOPPED else ended
        print(f"{name}: {(time.perf_counter() - start) / 60:.1f} min{ended}", flush=True)
        return max(code, compared(found[name], place.results, arguments.results) if arguments.check else 0)

    with ThreadPoolExecutor(arguments.jobs if several else 1) as pool:
        try:
            code = max(pool.map(one, dict.fromkeys(chosen)))
        except KeyboardInterrupt:
            signal.signal(signal.SIGINT, signal.SIG_IGN)  # the programs got the signal too, and are waited for
            pool.shutdown(wait=True, cancel_futures=True)
            print("interrupted; the same command resumes", file=sys.stderr)
            return 130
    if place.results == RESULTS:
        from results_index import update  # next to this file

        update(RESULTS)
    print(f"{len(chosen)} presets: {(time.perf_counter() - begun) / 60:.1f} min")
    return code


if __name__ == "__main__":
    sys.exit(main())
