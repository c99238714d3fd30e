"""What Laplace costs here and in laplace-torch: seconds, ratio and memory of the same work, row by row.

Writes outputs/results/laplace_speed.{csv,md}.

    python scripts/benchmark_laplace.py                      all rows, about half an hour on 2 idle cores
    python scripts/benchmark_laplace.py kfac_fit diag_fit    these rows
    python scripts/benchmark_laplace.py --repeats 1 --quick  once each, nothing written

Needs laplace-torch (`pip install -e '.[test]'`) with its backends curvlinops (its default), asdl and backpack; one that
does not do a piece of work, or is not installed, is named with the reason. A bound is the part of the work that no side
can leave out, on numbers that are there already. Each side of a row is a process of its own with the same threads; they
work in turn, one repeat each, and never together. Seconds are medians over repeats, of wall time and of the process's
CPU time (which other programs on the machine disturb less); ratios are of these medians. Memory is what the process
holds at its peak above what it held before the first repeat. A peer that has spent its allowance (--allowance, seconds)
is not repeated further. A side that would take more than --gib, or --limit seconds for one repeat, is
stopped. Rows that are named replace those of the tables; the others stay as they are.
"""

from __future__ import annotations

import argparse
import csv
import math
import os
import re
import resource
import statistics
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path

from laplace_benchmark_bounds import BOUNDS
from laplace_benchmark_cases import Row, rows

from bnn_runner.runs.cell import table_text
from bnn_runner.runtime.files import write_text

RESULTS = Path(__file__).resolve().parents[1] / "outputs" / "results"


@dataclass(frozen=True)
class Result:
    """One side of a row; `ratio` is its time by ours, `held_ratio` its memory by ours."""

    row: str
    what: str
    side: str
    seconds: float
    ratio: float
    cpu_seconds: float
    cpu_ratio: float
    memory_mib: float
    held_ratio: float
    repeats: int
    target: float
    load: float
    reason: str


@dataclass
class Side:
    """A process that does the work when told."""

    name: str
    process: subprocess.Popen[str]
    wall: list[float] = field(default_factory=list)
    cpu: list[float] = field(default_factory=list)
    memory_mib: float = float("nan")
    reason: str = ""

    @property
    def median(self) -> float:
        return statistics.median(self.wall) if self.wall else float("nan")

    @property
    def median_cpu(self) -> float:
        return statistics.median(self.cpu) if self.cpu else float("nan")

    def tell(self, word: str) -> None:
        """Give it a line."""
        assert self.process.stdin is not None
        with suppress(BrokenPipeError):
            self.process.stdin.write(word + "\n")
            self.process.stdin.flush()

    def hear(self, limit: float = math.inf) -> list[str]:
        """The words of its next answer; none, with the reason kept, when it failed or took over `limit` seconds."""
        watch = threading.Timer(min(limit, threading.TIMEOUT_MAX), self._stop, [limit])
        watch.daemon = True
        watch.start()
        try:
            return self._answer()
        finally:
            watch.cancel()

    def _stop(self, limit: float) -> None:
        self.reason = f"takes more than {limit:g} s"
        self.process.kill()

    def _answer(self) -> list[str]:
        assert self.process.stdout is not None
        while line := self.process.stdout.readline():
            if line.startswith("@"):
                head, *rest = line[1:].split()
                if head == "failed":
                    self.reason = " ".join(rest)
                    return []
                return rest
        self.reason = self.reason or "killed"
        return []


# ------------------------------------------------------------------------------------ one side


def child(row: Row, side: str, threads: int, gib: float) -> int:
    """Prepare; then work at each word from standard input, and answer with seconds and MiB."""
    import torch

    torch.set_num_threads(threads)
    warnings.simplefilter("ignore")
    try:
        work = row.make(side)
        print("@ready", flush=True)
        sys.stdin.readline()
        before = _status("VmRSS")
        Path("/proc/self/clear_refs").write_text("5")  # the peak starts anew
        limit = int(_status("VmSize") * 2**20 + gib * 2**30)
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
        for _ in sys.stdin:
            wall, cpu = time.perf_counter(), time.process_time()
            work()
            wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
            print(f"@ok {wall} {cpu} {_status('VmHWM') - before}", flush=True)
    except Exception as error:
        reason = " ".join(f"{type(error).__name__}: {error}".split())
        if "allocate" in reason or isinstance(error, MemoryError):
            reason = f"needs more than {gib:g} GiB"
        print(f"@failed {reason[:160]}", flush=True)
    return 0


def _status(name: str) -> float:
    """A line of /proc/self/status, MiB."""
    found = re.search(rf"^{name}:\s*(\d+) kB", Path("/proc/self/status").read_text(), re.MULTILINE)
    return int(found.group(1)) / 1024 if found else float("nan")


# ------------------------------------------------------------------------------------- a table


def measure(row: Row, repeats: int, threads: int, allowance: float, gib: float, limit: float) -> list[Result]:
    """All sides of a row in turn."""
    command = [sys.executable, str(Path(__file__).resolve()), "--child", row.name, "--threads", str(threads)]
    environment = os.environ | {"OMP_NUM_THREADS": str(threads), "OMP_WAIT_POLICY": "PASSIVE"}
    sides = []
    for name in row.sides:  # one after the other: nobody prepares while another works
        process = subprocess.Popen(
            [*command, "--side", name, "--gib", str(gib)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            env=environment,
        )
        sides.append(Side(name, process))
        sides[-1].hear()
    for side in sides:
        if not side.reason:
            side.tell("begin")
    for turn in range(repeats):
        for side in sides:
            spent = sum(side.wall) * (turn + 1) / max(turn, 1)
            if side.reason or (turn and side.name != "ours" and spent > allowance):
                continue
            side.tell("work")
            if answer := side.hear(limit):
                wall, cpu, memory = (float(word) for word in answer)
                if side.name != "ours":
                    wall, cpu = wall * row.peers_part, cpu * row.peers_part
                side.wall.append(wall)
                side.cpu.append(cpu)
                side.memory_mib = memory
                print(f"  {row.name} {side.name}: {wall:.3f} s, {memory:.0f} MiB", file=sys.stderr, flush=True)
    for side in sides:
        side.process.communicate()
    return _compared(row, sides)


def _compared(row: Row, sides: Sequence[Side]) -> list[Result]:
    """Each side beside ours, and beside the targets it is held to."""
    ours = sides[0]
    peers = [s for s in sides[1:] if s.wall and s.name not in BOUNDS]
    best = min(peers, key=lambda s: s.median, default=None)
    results = []
    for side in sides:
        target = row.target.get("best" if side is best else side.name, float("nan"))
        if side is best and side.name == "default":
            target = max(row.target.values(), default=float("nan"))
        results.append(
            Result(
                row.name,
                row.what,
                side.name + (", best" if side is best and len(sides) > 2 else ""),
                side.median,
                _ratio(side.median, ours.median),
                side.median_cpu,
                _ratio(side.median_cpu, ours.median_cpu),
                side.memory_mib,
                _ratio(side.memory_mib, ours.memory_mib),
                len(side.wall),
                target,
                os.getloadavg()[0],
                side.reason,
            )
        )
    return results


def _ratio(theirs: float, ours: float) -> float:
    return theirs / ours if ours > 0 else float("nan")


def table(results: Sequence[Result], note: str) -> str:
    """Markdown: one line a side."""
    lines = [
        "| work | side | seconds | times ours | aim | CPU times ours | MiB | times ours | n | load |",
        "|---|---|---:|---:|---:|---:|---:|---:|---:|---:|",
    ]
    for r in results:
        cells = [r.what if r.side == "ours" else "", r.side]
        if r.repeats:
            cells += [_number(r.seconds), _number(r.ratio, r), _number(r.target), _number(r.cpu_ratio, r)]
            cells += [f"{r.memory_mib:.0f}", _number(r.held_ratio, r), str(r.repeats), f"{r.load:.0f}"]
        else:
            cells += [r.reason, "", _number(r.target), "", "", "", "0", f"{r.load:.0f}"]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join([*lines, "", note])


def _number(value: float, beside: Result | None = None) -> str:
    """Three digits; nothing for what is not there, or for ours beside itself."""
    return "" if value != value or (beside is not None and beside.side == "ours") else f"{value:.3g}"


def kept(path: Path) -> list[Result]:
    """The results of an earlier call."""
    if not path.exists():
        return []
    types = {"row": str, "what": str, "side": str, "reason": str, "repeats": int}
    with path.open(newline="") as file:
        lines = list(csv.DictReader(file))
    return [Result(**{name: types.get(name, _float)(value) for name, value in line.items()}) for line in lines]


def _float(text: str) -> float:
    return float(text or "nan")


def main() -> int:
    known = {row.name: row for row in rows()}
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("rows", nargs="*", metavar="ROW", help=", ".join(known))
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--allowance", type=float, default=60, help="seconds a side may spend on its repeats")
    parser.add_argument("--limit", type=float, default=600, help="seconds one repeat may take before it is stopped")
    parser.add_argument("--gib", type=float, default=6, help="memory a side may take")
    parser.add_argument("--quick", action="store_true", help="nothing written")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    parser.add_argument("--side", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.child:
        return child(known[arguments.child], arguments.side, arguments.threads, arguments.gib)
    if unknown := [name for name in arguments.rows if name not in known]:
        parser.error(f"no such row: {', '.join(unknown)}")
    import torch

    note = (
        f"torch {torch.__version__}, float32, {arguments.threads} threads on {os.cpu_count()} cores; load: of "
        "the whole machine at the row's end. MiB: peak above what was held before. Ours: sums and factors in float64."
    )
    results = [] if arguments.quick else kept(RESULTS / "laplace_speed.csv")
    for row in known.values():
        if arguments.rows and row.name not in arguments.rows:
            continue
        measured = measure(
            row, arguments.repeats, arguments.threads, arguments.allowance, arguments.gib, arguments.limit
        )
        results = [r for r in results if r.row in known and r.row != row.name] + measured
        results.sort(key=lambda r: list(known).index(r.row))
        print(table(measured, note), flush=True)
        if not arguments.quick:
            write_text(RESULTS / "laplace_speed.md", table(results, note) + "\n")
            columns = [f.name for f in fields(Result)]
            write_text(RESULTS / "laplace_speed.csv", table_text([asdict(r) for r in results], columns))
    return 0


if __name__ == "__main__":
    sys.exit(main())
