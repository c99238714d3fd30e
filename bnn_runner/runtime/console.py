"""What a run prints as it goes: progress bars on a terminal, an occasional line in a file."""

from __future__ import annotations

import contextlib
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TextIO

from tqdm import tqdm

Progress = Callable[[str, int, int], None]
"""Called with (stage, steps done, steps in all) by everything that takes long."""

LINE_EVERY_SECONDS = 30.0
LONG_AFTER_SECONDS = 60.0
_FIRST_LOOK_SECONDS = 2.0


def duration(seconds: float) -> str:
    """Seconds in words a person reads: 45 s, 12 min, 3.5 h."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"


class Console:
    """Lines to the standard output and, once a cell is there, to its log too."""

    def __init__(self, stream: TextIO | None = None) -> None:
        self.stream = stream if stream is not None else sys.stdout
        self.log: Path | None = None
        self._progress: ProgressBar | None = None

    def say(self, text: str = "") -> None:
        if self._progress is not None:
            self._progress.clear()
        try:
            print(text, file=self.stream, flush=True)
        except BrokenPipeError:  # the reader is gone (`bnn-run | head`, a lost terminal): the run and its log continue
            self.stream = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115 - lives as long as the process
            os.dup2(self.stream.fileno(), sys.stdout.fileno())
        self.write_log(text)

    def write_log(self, text: str) -> None:
        if self.log is not None:
            # A log that fails ends no run: whatever fails to write the results reports it.
            with contextlib.suppress(OSError), self.log.open("a", encoding="utf-8") as f:
                f.write(time.strftime("%H:%M:%S ") + text + "\n")

    def progress(self) -> ProgressBar:
        self._progress = ProgressBar(self)
        return self._progress


class ProgressBar:
    """A `Progress`: a bar on a terminal, a line at most every 30 seconds in a file, nothing for what is quick.

    A new stage starts a new bar; a finished one is closed. Once the first seconds of a stage show that it will take
    over a minute, one line says how long.
    """

    def __init__(self, console: Console) -> None:
        self.console = console
        self.terminal = console.stream.isatty()
        self._stage = ""
        self._bar: tqdm[Any] | None = None
        self._begun = self._told = 0.0
        self._first = 0
        self._said_long = False

    def __call__(self, stage: str, done: int, total: int) -> None:
        now = time.monotonic()
        if stage != self._stage:
            self.close()
            self._stage, self._begun, self._told, self._first, self._said_long = stage, now, now, done, False
        took = now - self._begun
        moved = done - self._first
        if not self._said_long and took > _FIRST_LOOK_SECONDS and moved > 0:
            self._said_long = True
            whole = took / moved * (total - self._first)
            if whole > LONG_AFTER_SECONDS:
                self.console.say(
                    f"{stage}: this will take about {duration(whole)} "
                    f"({total - self._first} steps at {1000 * took / moved:.0f} ms)"
                )
        if self.terminal:
            self._draw(stage, done, total, took)
        elif now - self._told > LINE_EVERY_SECONDS and moved > 0:
            self._told = now
            left = duration(took / moved * (total - done))
            self.console.say(
                f"{stage}: {done} of {total} ({100 * done // total} %), {moved / took:.3g} a second, {left} left"
            )
        if done >= total:
            self.close()

    def _draw(self, stage: str, done: int, total: int, took: float) -> None:
        bar = self._bar
        if bar is None:
            if took < 0.3:
                return
            bar = self._bar = tqdm(
                total=total,
                initial=self._first,
                desc=stage,
                file=self.console.stream,
                leave=False,
                mininterval=0.2,
                dynamic_ncols=True,
            )
        bar.update(done - bar.n)

    def clear(self) -> None:
        """Take the bar off the line, so that text can be printed; it comes back with the next step."""
        if self._bar is not None:
            self._bar.clear()

    def close(self) -> None:
        if self._bar is not None:
            self._bar.close()
            self._bar = None
        self._stage = ""
