"""Figures do not depend on a person's settings of matplotlib, and one that fails is a note."""

from __future__ import annotations

import errno
from pathlib import Path

import matplotlib
import pytest

from bnn_runner.cli import report
from bnn_runner.errors import Interrupted
from bnn_runner.report import comparison, style
from bnn_runner.report.drawing import attempt, default_style
from bnn_runner.report.paths import short_paths, without_folders

ODD = {
    "text.usetex": True,
    "font.family": ["No Such Font"],
    "figure.facecolor": "red",
    "axes.formatter.use_locale": True,
    "savefig.bbox": "tight",
    "axes.prop_cycle": matplotlib.rcsetup.cycler(color=["k"]),
    "image.cmap": "prism",
    "lines.linewidth": 9.0,
    "figure.dpi": 20.0,
}


def picture(path: Path) -> Path:
    figure, (ax,) = style.new_figure(width=1, height=1)
    ax.plot([1, 2], [3, 4])
    return style.save(figure, path)


@pytest.mark.parametrize("setting", ODD)
def test_a_setting_is_the_default_while_drawing_and_back_afterwards(setting: str) -> None:
    with matplotlib.rc_context({setting: ODD[setting]}):
        before = matplotlib.rcParams[setting]
        with default_style():
            assert matplotlib.rcParams[setting] == matplotlib.rcParamsDefault[setting] != before
        assert matplotlib.rcParams[setting] == before


def test_figures_are_the_same_under_all_of_them(tmp_path: Path) -> None:
    """Planted bug: drawn without the style, the figure fails for want of LaTeX, or has another line width."""
    plain, _ = attempt("a", lambda: picture(tmp_path / "plain.png"))
    with matplotlib.rc_context(ODD):
        other, note = attempt("a", lambda: picture(tmp_path / "odd.png"))
    assert plain is not None and other is not None and not note
    assert plain.read_bytes() == other.read_bytes()
    with matplotlib.rc_context({"lines.linewidth": 9.0}):
        assert picture(tmp_path / "wide.png").read_bytes() != plain.read_bytes()


def fails(error: BaseException) -> Path:
    raise error


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (RuntimeError("latex was not found\nlong log"), "RuntimeError: latex was not found)"),
        (ImportError("numpy.core.multiarray failed to import"), "ImportError: numpy"),
        (MemoryError(), "(MemoryError)"),
        (OSError("cannot open resource"), "OSError: cannot open resource"),
        (ValueError("x" * 999), "x" * 100),
    ],
)
def test_a_figure_that_fails_is_a_note(error: BaseException, expected: str) -> None:
    drawn, note = attempt("bands.png", lambda: fails(error))
    assert drawn is None and note.startswith("the figure bands.png was not drawn") and expected in note
    assert len(note) < 300 and "\n" not in note


@pytest.mark.parametrize("error", [OSError(errno.ENOSPC, "No space left"), Interrupted("stopped"), KeyboardInterrupt()])
def test_what_concerns_the_run_is_raised(error: BaseException) -> None:
    with pytest.raises(type(error)):
        attempt("bands.png", lambda: fails(error))


def test_a_report_keeps_its_tables(
    write_cell, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for seed in (0, 1):
        write_cell("map", seed)
    monkeypatch.setattr(comparison, "comparison_figure", lambda table, path: fails(RuntimeError("no LaTeX")))
    assert report.main([f"output_dir={write_cell.outputs}", "name=t"]) == 0
    printed = capsys.readouterr().out
    assert "note: the figure of the table was not drawn (RuntimeError: no LaTeX)" in printed
    results = write_cell.outputs / "results"
    assert (results / "t.csv").is_file() and not (results / "t.png").exists()


@pytest.mark.parametrize(
    ("texts", "expected"),
    [
        (["/home/ann/mine.csv", "/data/other.csv"], ["mine.csv", "other.csv"]),
        (["/home/ann/a/mine.csv", "/home/ann/b/mine.csv"], ["a/mine.csv", "b/mine.csv"]),
        (["/a/x/mine.csv", "/b/x/mine.csv", "/c/y.csv"], ["a/x/mine.csv", "b/x/mine.csv", "y.csv"]),
        (["C:\\Users\\ann\\mine.csv", "—"], ["mine.csv", "—"]),
        (["relu", "kfac", "ood/gap", "0.5"], ["relu", "kfac", "ood/gap", "0.5"]),
    ],
)
def test_paths_in_columns(texts: list[str], expected: list[str]) -> None:
    assert short_paths(texts) == expected


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("Could not read /home/ann/x y/mine.csv (damaged)", "Could not read x y/mine.csv (damaged)"),
        ("FAILED a/b: data.path=/srv/data/mine.csv does not exist", "FAILED a/b: data.path=mine.csv does not exist"),
        ("ood/gap: 3 nats/point, 1/2 of it", "ood/gap: 3 nats/point, 1/2 of it"),
        ("see https://a.org/b/c.html", "see https://a.org/b/c.html"),
    ],
)
def test_paths_in_notes(text: str, expected: str) -> None:
    assert without_folders(text) == expected
