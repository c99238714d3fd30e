"""Drawings at once: what each wrote, and errors of a copy raised here."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from bnn_runner.report.parallel_draw import draw_in_parallel


def _writer(path: Path, text: str = "drawn"):
    def draw() -> Path:
        path.write_text(f"{text} by {os.getpid()}")
        return path

    return draw


def test_each_drawing_says_whether_it_wrote_its_file(tmp_path):
    first, last = tmp_path / "first", tmp_path / "last"
    drawn = draw_in_parallel([_writer(first), lambda: None, _writer(last)])
    assert drawn == [True, False, True]
    assert last.read_text() == f"drawn by {os.getpid()}"
    assert first.read_text().startswith("drawn by")


def test_the_error_of_a_copy_is_raised_here(tmp_path):
    def broken() -> Path:
        raise OSError(28, "No space left on device")

    with pytest.raises(OSError, match="No space left"):
        draw_in_parallel([broken, _writer(tmp_path / "last")])
    with pytest.raises(OSError, match="No space left"):
        draw_in_parallel([_writer(tmp_path / "first"), broken])
    assert (tmp_path / "first").exists()  # waited for


def test_a_copy_that_was_killed_is_drawn_here(tmp_path):
    here, path = os.getpid(), tmp_path / "first"

    def killed() -> Path:
        if os.getpid() != here:
            os.kill(os.getpid(), 9)
        path.write_text("drawn")
        return path

    assert draw_in_parallel([killed, _writer(tmp_path / "last")]) == [True, True]
    assert path.read_text() == "drawn"
