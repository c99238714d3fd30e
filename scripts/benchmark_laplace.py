"""Cost of Laplace here and in laplace-torch: seconds, ratio and memory of the same computation, case by case.

Writes outputs/results/laplace_speed.{csv,md}.

    python scripts/benchmark_laplace.py                      all cases, about half an hour on 2 idle cores
    python scripts/benchmark_laplace.py kfac_fit diag_fit    these cases; the rows of the others are kept
    python scripts/benchmark_laplace.py --repeats 1 --quick  once each, nothing is written

Needs laplace-torch (`pip install -e '.[test]'`) with its backends curvlinops (its default), asdl and backpack. If a
backend does not support a case, or is not installed, the table has the reason. A bound is the arithmetic that no
implementation can avoid, on arrays that already exist. Each side of a case has its own process with the same number of
threads; the sides take turns, one repeat each, and never run together. Seconds are medians over repeats of wall time
and of the process's CPU time (which other programs disturb less), and ratios are ratios of these medians. Memory is the
process's peak minus its memory before the first repeat. A peer that has used up its allowance (--allowance, seconds) is
not repeated further. A side that needs more than --gib, or more than --limit seconds for one repeat, is stopped.
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
from laplace_benchmark_cases import Case, cases

from bnn_runner.runs.cell import table_text
from bnn_runner.runtime.files import write_text

RESULTS = Path(__file__).resolve().parents[1] / "outputs" / "results"


@dataclass(frozen=True)
class Result:
    """One side of a case; `ratio` is its time divided by ours, `held_ratio` its memory divided by ours."""

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
    """A process that runs the case once for each line that it reads."""

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

    def send(self, word: str) -> None:
        """Write a line to its standard input."""
        assert self.process.stdin is not None
        with suppress(BrokenPipeError):
            self.process.stdin.write(word + "\n")
            self.process.stdin.flush()

    def receive(self, limit: float = math.inf) -> list[str]:
        """The words of its next answer; empty, with `reason` set, if it failed or took over `limit` seconds."""
        watch = threading.Timer(min(limit, threading.TIMEOUT_MAX), self._stop, [limit])
        watch.daemon = True
        watch.start()
        try:
            return self._answer()
        finally:
            watch.cancel()

    def _stop(self, limit: float) -> None:
        self.reason = f"needs more than {limit:g} s"
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


def child(case: Case, side: str, threads: int, gib: float) -> int:
    """Prepare a side, then run it once for each line of standard input and print seconds and MiB."""
    import torch

    torch.set_num_threads(threads)
    warnings.simplefilter("ignore")
    try:
        run = case.make(side)
        print("@ready", flush=True)
        sys.stdin.readline()
        before = _status("VmRSS")
        Path("/proc/self/clear_refs").write_text("5")  # resets the peak
        limit = int(_status("VmSize") * 2**20 + gib * 2**30)
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
        for _ in sys.stdin:
            wall, cpu = time.perf_counter(), time.process_time()
            run()
            wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
            print(f"@ok {wall} {cpu} {_status('VmHWM') - before}", flush=True)
    except Exception as error:
        reason = " ".join(f"{type(error).__name__}: {error}".split())
        if "allocate" in reason or isinstance(error, MemoryError):
            reason = f"needs more than {gib:g} GiB"
        print(f"@failed {reason[:160]}", flush=True)
    return 0


def _status(name: str) -> float:
    """A value of /proc/self/status, MiB."""
    found = re.search(rf"^{name}:\s*(\d+) kB", Path("/proc/self/status").read_text(), re.MULTILINE)
    return int(found.group(1)) / 1024 if found else float("nan")


# ------------------------------------------------------------------------------------- a table


def measure(case: Case, repeats: int, threads: int, allowance: float, gib: float, limit: float) -> list[Result]:
    """All sides of a case in turn."""
    command = [sys.executable, str(Path(__file__).resolve()), "--child", case.name, "--threads", str(threads)]
    environment = os.environ | {"OMP_NUM_THREADS": str(threads), "OMP_WAIT_POLICY": "PASSIVE"}
    sides = []
    for name in case.sides:  # one after the other: no side prepares while another runs
        process = subprocess.Popen(
            [*command, "--side", name, "--gib", str(gib)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            env=environment,
        )
        sides.append(Side(name, process))
        sides[-1].receive()
    for side in sides:
        if not side.reason:
            side.send("begin")
    for turn in range(repeats):
        for side in sides:
            spent = sum(side.wall) * (turn + 1) / max(turn, 1)
            if side.reason or (turn and side.name != "ours" and spent > allowance):
                continue
            side.send("run")
            if answer := side.receive(limit):
                wall, cpu, memory = (float(word) for word in answer)
                if side.name != "ours":
                    wall, cpu = wall * case.peers_part, cpu * case.peers_part
                side.wall.append(wall)
                side.cpu.append(cpu)
                side.memory_mib = memory
                print(f"  {case.name} {side.name}: {wall:.3f} s, {memory:.0f} MiB", file=sys.stderr, flush=True)
    for side in sides:
        side.process.communicate()
    return _compared(case, sides)


def _compared(case: Case, sides: Sequence[Side]) -> list[Result]:
    """Each side compared with ours and with its target."""
    ours = sides[0]
    peers = [s for s in sides[1:] if s.wall and s.name not in BOUNDS]
    best = min(peers, key=lambda s: s.median, default=None)
    results = []
    for side in sides:
        target = case.target.get("best" if side is best else side.name, float("nan"))
        if side is best and side.name == "default":
            target = max(case.target.values(), default=float("nan"))
        results.append(
            Result(
                case.name,
                case.what,
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
    """Markdown: one line per side."""
    lines = [
        "| case | side | seconds | ÷ ours | target | CPU seconds ÷ ours | MiB | ÷ ours | n | load |",
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


def _number(value: float, ratio_of: Result | None = None) -> str:
    """Three digits; empty for NaN, and for our own ratios, which are 1."""
    return "" if value != value or (ratio_of is not None and ratio_of.side == "ours") else f"{value:.3g}"


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
    known = {case.name: case for case in cases()}
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cases", nargs="*", metavar="CASE", help=", ".join(known))
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--allowance", type=float, default=60, help="seconds a side may spend on its repeats")
    parser.add_argument("--limit", type=float, default=600, help="seconds one repeat may take before it is stopped")
    parser.add_argument("--gib", type=float, default=6, help="memory a side may take")
    parser.add_argument("--quick", action="store_true", help="write nothing")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    parser.add_argument("--side", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.child:
        return child(known[arguments.child], arguments.side, arguments.threads, arguments.gib)
    if unknown := [name for name in arguments.cases if name not in known]:
        parser.error(f"unknown case: {', '.join(unknown)}. The cases: {', '.join(known)}.")
    import torch

    note = (
        f"torch {torch.__version__}, float32, {arguments.threads} threads on {os.cpu_count()} cores. "
        "÷ ours: divided by our value. MiB: peak minus memory before. load: of the machine at the end of the case. "
        "Our sums and factors are float64."
    )
    results = [] if arguments.quick else kept(RESULTS / "laplace_speed.csv")
    for case in known.values():
        if arguments.cases and case.name not in arguments.cases:
            continue
        measured = measure(
            case, arguments.repeats, arguments.threads, arguments.allowance, arguments.gib, arguments.limit
        )
        results = [r for r in results if r.row in known and r.row != case.name] + measured
        results.sort(key=lambda r: list(known).index(r.row))
        print(table(measured, note), flush=True)
        if not arguments.quick:
            write_text(RESULTS / "laplace_speed.md", table(results, note) + "\n")
            columns = [f.name for f in fields(Result)]
            write_text(RESULTS / "laplace_speed.csv", table_text([asdict(r) for r in results], columns))
    return 0


if __name__ == "__main__":
    sys.exit(main())
