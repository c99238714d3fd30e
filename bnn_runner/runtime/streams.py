"""Standard output and error that accept every text: in any encoding, closed, or with a reader that has left.

A run's results are in files; what it prints must never end it.
"""

from __future__ import annotations

import codecs
import errno
import io
import os
import sys

READABLE = {
    "↑": "(higher is better)",
    "↓": "(lower is better)",
    "±": "+-",
    "·": "-",
    "×": "x",
    "−": "-",
    "–": "-",
    "—": "-",
    "…": "...",
    "†": "*",
    "‡": "**",
    "→": "->",
    "’": "'",
    "σ": "sigma",
    "λ": "lambda",
    "μ": "mu",
    "µ": "u",
    "²": "^2",
    "³": "^3",
    "√": "sqrt",
}
"""What replaces a character that the encoding of a stream lacks; any other becomes '?'."""
_HANDLER = "bnn_runner.readable"


def _readable(error: UnicodeError) -> tuple[str, int]:
    if not isinstance(error, UnicodeEncodeError):
        raise error
    text = "".join(READABLE.get(c, "?") for c in error.object[error.start : error.end])
    return text, error.end


codecs.register_error(_HANDLER, _readable)


class Output(io.TextIOWrapper):
    """A text stream that goes on without its file: what can no longer be written is discarded.

    Attributes:
        lost: Why writing failed; empty if it did not, or if the reader closed a pipe (`... | head`).
    """

    lost = ""

    def write(self, text: str) -> int:
        try:
            return super().write(text)
        except (OSError, ValueError) as error:
            self._discard(error)
            return len(text)

    def flush(self) -> None:
        try:
            super().flush()
        except (OSError, ValueError) as error:
            self._discard(error)

    def _discard(self, error: Exception) -> None:
        if isinstance(error, ValueError) or (isinstance(error, OSError) and error.errno == errno.EBADF):
            return  # closed
        assert isinstance(error, OSError)
        first, self.lost = not self.lost, self.lost or ("" if error.errno == errno.EPIPE else str(error.strerror))
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, self.fileno())
        os.close(null)
        if first and self.lost and self is sys.stdout:
            print(f"standard output could not be written ({self.lost}); the rest of it is lost", file=sys.stderr)


def accept_every_text() -> None:
    """Prepares standard output and error of this process. Streams that are not those of the process only get the
    replacement of characters.
    """
    for number in range(3):  # a closed descriptor would be given to the next file that is opened
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)
    for number, name in ((1, "stdout"), (2, "stderr")):
        stream = getattr(sys, name)
        if stream is None:
            opened = io.BufferedWriter(io.FileIO(number, "w", closefd=False))
            setattr(sys, name, Output(opened, "utf-8", _HANDLER, line_buffering=True))
        elif type(stream) is io.TextIOWrapper and stream is getattr(sys, f"__{name}__"):
            encoding, lines, through = stream.encoding, stream.line_buffering, stream.write_through
            stream.flush()
            output = Output(stream.detach(), encoding, _HANDLER, line_buffering=lines, write_through=through)
            setattr(sys, name, output)
            setattr(sys, f"__{name}__", output)
        elif isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors=_HANDLER)


def output_lost() -> str:
    """Returns why standard output could not be written; empty if it was, or if its reader left."""
    sys.stdout.flush()
    return str(getattr(sys.stdout, "lost", ""))
