"""What a machine does to the output: missing characters, closed streams, readers that leave, full disks.

Small processes that import only `bnn_runner.runtime.streams`; whole runs are exhaustive.
"""

from __future__ import annotations

import io
import os
import subprocess
import sys
from pathlib import Path

import pytest

from bnn_runner.config.settings import anchor
from bnn_runner.runtime.console import Console
from bnn_runner.runtime.files import explain_write_error
from bnn_runner.runtime.streams import READABLE, Output, accept_every_text

ROOT = Path(__file__).parents[2]
TEXT = "rmse ↓ 0.4 ± 0.1 · größe \udcff 字"


@pytest.mark.parametrize(
    ("encoding", "expected"),
    [
        ("utf-8", "rmse ↓ 0.4 ± 0.1 · größe ? 字"),
        ("latin-1", "rmse (lower is better) 0.4 ± 0.1 · größe ? ?"),
        ("cp1252", "rmse (lower is better) 0.4 ± 0.1 · größe ? ?"),
        ("ascii", "rmse (lower is better) 0.4 +- 0.1 - gr??e ? ?"),
        ("koi8-r", "rmse (lower is better) 0.4 +- 0.1 · gr??e ? ?"),
    ],
)
def test_characters_that_an_encoding_lacks(encoding: str, expected: str) -> None:
    raw = io.BytesIO()
    stream = Output(raw, encoding, "bnn_runner.readable")
    print(TEXT, file=stream, end="", flush=True)
    assert raw.getvalue().decode(encoding) == expected


def test_every_character_of_our_messages_has_a_replacement_or_is_in_latin_1() -> None:
    """Planted bug: an arrow in a new message that becomes '?' on an old terminal."""
    used = set()
    for path in [*(ROOT / "bnn_runner" / "report").glob("*.py"), *(ROOT / "bnn_runner" / "runs").glob("*.py")]:
        used |= {c for c in path.read_text(encoding="utf-8") if c in "↑↓→±×·…†‡"}
    assert used <= READABLE.keys() and all(text.isascii() for text in READABLE.values())


def small_process(code: str, redirect: str, **environment: str) -> tuple[int, str, str]:
    code = f"import sys\nfrom bnn_runner.runtime.streams import *\naccept_every_text()\n{code}"
    done = subprocess.run(
        ["sh", "-c", f'exec "$0" -c "$1" {redirect}', sys.executable, code],
        capture_output=True,
        text=True,
        env={"PYTHONPATH": str(ROOT), "PATH": os.environ["PATH"], **environment},
    )
    return done.returncode, done.stdout, done.stderr


@pytest.mark.parametrize(
    ("code", "redirect", "environment", "out", "err"),
    [
        ("print('↑ done')", "", {"PYTHONIOENCODING": "latin-1"}, "(higher is better) done\n", ""),
        ("print('\\xb1')", "", {"PYTHONCOERCECLOCALE": "0", "PYTHONUTF8": "0", "LC_ALL": "C"}, "+-\n", ""),
        ("print('±', file=sys.stderr)", "", {"PYTHONIOENCODING": "ascii"}, "", "+-\n"),
        ("print('x'); print('y', file=sys.stderr)", ">&-", {}, "", "y\n"),
        ("print('x'); print('y', file=sys.stderr)", "2>&-", {}, "x\n", ""),
        ("f = open('/dev/null'); assert f.fileno() > 2; print('x')", ">&- 2>&- <&-", {}, "", ""),
        ("print('x' * 10**6); print(output_lost() or 'written', file=sys.stderr)", "| head -c 1", {}, "x", "written\n"),
        ("print('x'); sys.stdout.close()", "", {}, "x\n", ""),
    ],
)
@pytest.mark.skipif(sys.platform != "linux", reason="a POSIX shell")
def test_streams_of_a_process(code: str, redirect: str, environment: dict[str, str], out: str, err: str) -> None:
    assert small_process(code, redirect, **environment) == (0, out, err)


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="there is no /dev/full")
def test_a_full_disk_behind_standard_output_is_reported_once() -> None:
    code, _, err = small_process("print('x' * 9999); print('y'); sys.exit(7 if output_lost() else 0)", ">/dev/full")
    assert code == 7 and err.count("standard output could not be written (No space left on device)") == 1
    assert small_process("print('x')", ">/dev/full 2>/dev/full")[0] == 0


def test_a_console_goes_on_without_its_stream(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Gone(io.StringIO):
        def write(self, text: str) -> int:
            raise OSError(5, "Input/output error")

    console = Console(Gone())
    console.log = tmp_path / "log.txt"
    console.say("first")
    console.say("second ↑")
    assert [line[9:] for line in console.log.read_text(encoding="utf-8").splitlines()] == ["first", "second ↑"]
    monkeypatch.setattr(sys, "stdout", None)
    Console().say("nobody reads this")
    assert not Console().progress().terminal


def test_other_streams_are_left_in_place(monkeypatch: pytest.MonkeyPatch) -> None:
    """A notebook's stream is its own class: it is kept."""
    notebook = io.StringIO()
    monkeypatch.setattr(sys, "stdout", notebook)
    accept_every_text()
    assert sys.stdout is notebook


def test_a_user_without_a_home_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """In a container with an unknown user `~` has no meaning; the default needs no folder there."""

    def unknown(path: Path) -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(Path, "expanduser", unknown)
    assert anchor("~/.cache/bnn_runner/data", tmp_path).parts[-3:] == (".cache", "bnn_runner", "data")
    assert explain_write_error(FileNotFoundError(2, "No usable temporary directory found in ['/tmp']"))


WHOLE = ["method=map", "debug=fast", "metric=[marginal]"]


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("redirect", "environment"),
    [
        ("", {"PYTHONIOENCODING": "latin-1"}),
        ("", {"PYTHONCOERCECLOCALE": "0", "PYTHONUTF8": "0", "LC_ALL": "C"}),
        (">&- 2>&- <&-", {}),
        (">/dev/full 2>/dev/full", {}),
        ("| head -1", {}),
        ("", {"MPLBACKEND": "module://no_such_package.backend"}),
        ("", {"MATPLOTLIBRC": "usetex"}),
        ("", {"MATPLOTLIBRC": "damaged"}),
        ("", {"MPLCONFIGDIR": "/proc/nowhere", "HOME": "/nowhere"}),
    ],
)
def test_whole_sweeps(redirect: str, environment: dict[str, str], tmp_path: Path) -> None:
    """Every one leaves DONE and figures, exit code 0 and no traceback."""
    for name, content in {
        "usetex": b"text.usetex: True\nfont.family: No Such",
        "damaged": b"font.family: \xff",
    }.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / "matplotlibrc").write_bytes(content)
    done = subprocess.run(
        ["sh", "-c", f'"$0" -m bnn_runner.cli.main -m {" ".join(WHOLE)} {redirect}', sys.executable],
        capture_output=True,
        cwd=tmp_path,
        env={"PYTHONPATH": str(ROOT), "PATH": os.environ["PATH"], "OMP_NUM_THREADS": "1", **environment},
    )
    assert done.returncode == 0 and b"Traceback" not in done.stderr, done.stderr
    [cell] = tmp_path.glob("outputs/debug/runs/*/*/*/*/DONE")
    assert list(cell.parent.glob("figures/*.png"))
