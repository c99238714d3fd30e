"""Output of a run in progress: progress bars on a terminal, occasional lines when the output is a file."""

from __future__ import annotations

import contextlib
import io
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TextIO

from tqdm import tqdm

Progress = Callable[[str, int, int], None]
"""Called with (stage, steps done, total steps) by everything that takes long."""

LINE_EVERY_SECONDS = 30.0
LONG_AFTER_SECONDS = 60.0
_FIRST_ESTIMATE_SECONDS = 2.0


def duration(seconds: float) -> str:
    """Formats a duration in a readable unit: 45 s, 12 min, 3.5 h."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"


class Console:
    """Prints lines to standard output and, once `log` is set, appends them to that file with a time stamp.

    Args:
        stream: Where to print; standard output by default.
    """

    def __init__(self, stream: TextIO | None = None) -> None:
        self.stream = stream or sys.stdout or io.StringIO()
        self.log: Path | None = None
        self._progress: ProgressBar | None = None

    def say(self, text: str = "") -> None:
        if self._progress is not None:
            self._progress.clear()
        try:
            print(text, file=self.stream, flush=True)
        except (OSError, UnicodeError, ValueError):  # of the caller's own stream: the run and its log continue
            self.stream = io.StringIO()
        self.write_log(text)

    def write_log(self, text: str) -> None:
        if self.log is not None:
            # A log that cannot be written must not end the run; writing the results reports a full disk anyway.
            with contextlib.suppress(OSError), self.log.open("a", encoding="utf-8") as f:
                f.write(time.strftime("%H:%M:%S ") + text + "\n")

    def progress(self) -> ProgressBar:
        self._progress = ProgressBar(self)
        return self._progress


class ProgressBar:
    """A `Progress` callback: a bar on a terminal, a line every 30 seconds otherwise, nothing for quick stages.

    A new stage closes the bar of the previous one and starts its own. If the first seconds of a stage suggest that it
    takes more than a minute, one line prints the estimate.
    """

    def __init__(self, console: Console) -> None:
        self.console = console
        self.terminal = console.stream.isatty()
        self._stage = ""
        self._bar: tqdm[Any] | None = None
        self._started = self._last_line = 0.0
        self._first = 0
        self._estimated = False

    def __call__(self, stage: str, done: int, total: int) -> None:
        now = time.monotonic()
        if stage != self._stage:
            self.close()
            self._stage, self._started, self._last_line, self._first, self._estimated = stage, now, now, done, False
        elapsed = now - self._started
        steps = done - self._first
        if not self._estimated and elapsed > _FIRST_ESTIMATE_SECONDS and steps > 0:
            self._estimated = True
            whole = elapsed / steps * (total - self._first)
            if whole > LONG_AFTER_SECONDS:
                self.console.say(
                    f"{stage}: this will take about {duration(whole)} "
                    f"({total - self._first} steps at {1000 * elapsed / steps:.0f} ms)"
                )
        if self.terminal:
            self._draw(stage, done, total, elapsed)
        elif now - self._last_line > LINE_EVERY_SECONDS and steps > 0:
            self._last_line = now
            left = duration(elapsed / steps * (total - done))
            self.console.say(
                f"{stage}: {done} of {total} ({100 * done // total} %), {steps / elapsed:.3g} steps/s, {left} left"
            )
        if done >= total:
            self.close()

    def _draw(self, stage: str, done: int, total: int, elapsed: float) -> None:
        bar = self._bar
        if bar is None:
            if elapsed < 0.3:
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
        """Erases the bar so that a line can be printed; the next step draws it again."""
        if self._bar is not None:
            self._bar.clear()

    def close(self) -> None:
        if self._bar is not None:
            self._bar.close()
            self._bar = None
        self._stage = ""
