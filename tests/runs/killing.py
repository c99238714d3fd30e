"""A process that has everything imported and computed nothing, forks runs of itself and kills each at a chosen event.

An event is a step that a run tells as progress, or something it does to a file below its output folder: opening
for writing, flushing (there the file is cut to half of its length first, as a crash may leave it), renaming,
removing, linking. The first run of each kind is let live, and lists the events that there are.

Run as a script with a folder and kinds of runs; it prints what happened to every run as JSON.
"""

from __future__ import annotations

import dataclasses
import io
import json
import os
import random
import re
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
import torch.fx.experimental.symbolic_shapes  # torch.autograd.grad imports it late, and every child would

from bnn_runner import runner
from bnn_runner.experiment import Experiment, load_experiment
from bnn_runner.mcmc import checkpoint as mcmc_checkpoint
from bnn_runner.report.read_cells import find_cells
from bnn_runner.runs import provenance
from bnn_runner.runtime.console import Console, ProgressBar
from bnn_runner.training import engine as training
from bnn_runner.variational import fit as variational_fit

COMMON = [
    "data=gap1d", "data.num_train=40", "data.num_test=16", "model.hidden=[5]", "schedule.epochs=6", "schedule.lr=0.02",
    "schedule.batch_size=12", "eval.num_draws=12", "eval.batch_size=8", "metric=[marginal,rmse]",
    "figures=false", "save_posterior=true", "threads=1", "device=cpu", "time_limit=null",
]  # fmt: skip
KINDS = {
    "laplace": ["method=laplace_kfac"],
    "ensemble": ["method=ensemble", "method.size=3", "stack=always"],
    "sghmc": ["method=sghmc", "method.chains=2", "method.length=0.2", "method.keep=12", "method.start=initial"],
    "swag": ["method=swag", "method.epochs=8", "method.rank=4"],
    "bbb": ["method=bbb", "method.epochs=6"],
}
MOMENTS = {"laplace": 2, "ensemble": 1, "sghmc": 2, "swag": 2, "bbb": 2}  # of each phase
PHASES = ("training", "posterior", "evaluation", "writing")
OTHERS = ("before", "after")
_FILE_EVENTS = {"open": "open", "os.rename": "rename", "os.remove": "remove", "os.link": "link"}


def kind_of(path: str) -> str:
    """The name of a file without what differs from run to run."""
    name = re.sub(r"\.(writing|lease)-\w+$", r".\1", Path(path).name)
    return re.sub(r"[0-9a-f]{8,}", "*", name)


class Recorder:
    """Counts the events of this process and ends it at the one of number `fatal`."""

    def __init__(self, folder: Path, fatal: int | None) -> None:
        self.folder, self.fatal = str(folder), fatal
        self.phase = "before"
        self.events: list[tuple[str, str]] = []
        self.thread = threading.get_ident()

    def event(self, what: str, last_act: Callable[[], object] = lambda: None) -> None:
        if threading.get_ident() != self.thread:  # heartbeats come when they come
            return
        self.events.append((self.phase, what))
        if len(self.events) - 1 == self.fatal:
            last_act()
            os.kill(os.getpid(), signal.SIGKILL)

    def audit(self, name: str, arguments: tuple[Any, ...]) -> None:
        if name not in _FILE_EVENTS or not isinstance(arguments[0], (str, os.PathLike)):
            return
        path = os.fspath(arguments[0])
        writes = name != "open" or bool((arguments[2] or 0) & (os.O_WRONLY | os.O_RDWR))
        if writes and path.startswith(self.folder):
            self.event(f"{_FILE_EVENTS[name]} {kind_of(path)}")

    def install(self) -> None:
        sys.addaudithook(self.audit)
        fsync, stage, recorder = os.fsync, provenance.Stages.stage, self

        def torn(descriptor: int) -> None:
            half = os.fstat(descriptor).st_size // 2
            name = kind_of(os.readlink(f"/proc/self/fd/{descriptor}"))
            recorder.event(f"flush {name}", lambda: os.ftruncate(descriptor, half))
            fsync(descriptor)

        @contextmanager
        def told(stages: provenance.Stages, name: str, device: torch.device) -> Iterator[None]:
            recorder.phase = name
            with stage(stages, name, device):
                yield
            recorder.phase = "after"

        os.fsync = torn
        provenance.Stages.stage = told  # type: ignore[method-assign]
        for module in (training, variational_fit):
            module.CHECKPOINT_SECONDS = 0.0  # type: ignore[attr-defined]
        mcmc_checkpoint.SAVE_SECONDS = 0.0


class Telling(Console):
    """Nothing printed; every step is an event."""

    def __init__(self, recorder: Recorder) -> None:
        super().__init__(io.StringIO())
        self.recorder = recorder

    def progress(self) -> ProgressBar:
        recorder = self.recorder

        class Steps(ProgressBar):
            def __call__(self, stage: str, done: int, total: int) -> None:
                recorder.event(f"step of {stage}")

        return Steps(self)


def forked(experiment: Experiment, folder: Path, fatal: int | None = None) -> tuple[int, list[tuple[str, str]], str]:
    """One run in a child: its exit code (below 0 the signal), its events, and what went wrong."""
    settings = dataclasses.replace(experiment.settings, output_dir=folder, cache_dir=folder / "cache")
    experiment = dataclasses.replace(experiment, settings=settings)
    ends, begins = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(ends)
        code, recorder, trouble = 70, Recorder(folder, fatal), ""
        try:
            recorder.install()
            outcome = runner.run(experiment, Telling(recorder))
            ended = outcome.status in ("done", "skipped")  # skipped: the kill came after the last file
            code, trouble = (0 if ended else 71), outcome.message
        except BaseException:
            trouble = traceback.format_exc()
        with open(begins, "w") as told:
            json.dump([recorder.events, trouble], told)
        os._exit(code)
    os.close(begins)
    with open(ends) as heard:
        text = heard.read()
    status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    events, trouble = json.loads(text) if text else ([], "")
    return status, [tuple(e) for e in events], trouble


def chosen(events: list[tuple[str, str]], each: dict[str, int], stream: random.Random) -> list[int]:
    """Of each phase so many events, spread over what the events are."""
    found: list[int] = []
    for phase, count in each.items():
        places = [i for i, (where, _) in enumerate(events) if where == phase]
        stream.shuffle(places)
        seen: dict[str, int] = {}
        turn = {}
        for i in places:  # the first of every kind of event, then the second of every kind ...
            turn[i] = seen[events[i][1]] = seen.get(events[i][1], -1) + 1
        found += sorted(places, key=turn.__getitem__)[:count]
    return sorted(found)


def whole(path: Path) -> bool:
    """Whether a file under a name that somebody reads can be read; what is being written has a name with a dot."""
    if not path.is_file() or path.name.startswith("."):
        return True
    try:
        if path.suffix == ".json":
            json.loads(path.read_text())
        elif path.suffix == ".safetensors":
            safetensors.torch.load_file(path)
        elif path.suffix in (".pt", ".partial"):
            torch.load(path, weights_only=True)
    except Exception:
        return False
    return True


def cell_of(folder: Path) -> Path:
    """The one cell below an output folder."""
    [cell] = (path for path in (folder / "runs").glob("*/*/*/*") if path.is_dir())
    return cell


def main(root: Path, kinds: list[str]) -> None:
    stream = random.Random(20)
    report = []
    for kind in kinds:
        experiment = load_experiment([*COMMON, *KINDS[kind]], None, root)
        code, events, trouble = forked(experiment, root / kind / "whole")
        assert code == 0, trouble
        each = dict.fromkeys(PHASES, MOMENTS[kind]) | dict.fromkeys(OTHERS, int(kind in ("laplace", "ensemble")))
        moments = chosen(events, each, stream)
        if kind == "ensemble":  # when some lanes are stored and others are not
            stored = [i for i, (_, what) in enumerate(events) if what == "rename .*.safetensors.writing"]
            moments.append(stored[1])
        for number in moments:
            folder = root / kind / str(number)
            killed, _, trouble = forked(experiment, folder, number)
            unreadable = [str(path.relative_to(folder)) for path in folder.rglob("*") if not whole(path)]
            status = next((cell.status for cell in find_cells(folder)), "")
            again, _, more = forked(experiment, folder)
            told = {"kind": kind, "phase": events[number][0], "event": events[number][1], "folder": str(folder)}
            report.append(
                told
                | {"killed": killed, "unreadable": unreadable, "status": status}
                | {"again": again, "trouble": trouble + more}
            )
    print(json.dumps(report))


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
