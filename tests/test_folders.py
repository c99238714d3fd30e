"""The folders of tests/ mirror the packages of bnn_runner/: tests of a module stand in the folder of its package."""

from __future__ import annotations

from pathlib import Path

ROOT = Path(__file__).parents[1]
OTHERS = {
    "contract": "what must hold for every choice of conf/",
    "packaging": "the wheel, the README, extensions from outside",
    "scripts": "scripts/",
}
"""Folders that mirror no package."""


def test_every_folder_mirrors_a_package() -> None:
    tests, package = ROOT / "tests", ROOT / "bnn_runner"
    folders = {path.parent.relative_to(tests).as_posix() for path in tests.rglob("test_*.py")} - {"."}
    packages = {path.parent.relative_to(package).as_posix() for path in package.rglob("__init__.py")} - {"."}
    assert not packages & OTHERS.keys()
    assert folders >= OTHERS.keys()
    unknown = sorted(folders - packages - OTHERS.keys())
    assert not unknown, f"no package of bnn_runner/ has these names: {unknown}"


def test_files_at_the_top_test_what_stands_at_the_top() -> None:
    """A module at the root of bnn_runner/, or all of it."""
    whole = {"test_layers", "test_folders", "test_messages"}
    modules = {f"test_{path.stem}" for path in (ROOT / "bnn_runner").glob("*.py")}
    assert {path.stem for path in (ROOT / "tests").glob("test_*.py")} <= modules | whole
