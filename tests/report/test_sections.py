"""Report sections: every file that has one is in the table, and the command's help shows it."""

from __future__ import annotations

import importlib
from pathlib import Path

import bnn_runner.report
from bnn_runner.cli.report import main
from bnn_runner.report.section import Section
from bnn_runner.report.sections import SECTIONS


def test_every_section_is_in_the_table_once() -> None:
    """Planted bugs: a file whose SECTION is in no table; two sections with one flag."""
    names = [path.stem for path in Path(bnn_runner.report.__path__[0]).glob("*.py") if path.stem != "__init__"]
    modules = [importlib.import_module(f"bnn_runner.report.{name}") for name in names]
    found = [module.SECTION for module in modules if isinstance(getattr(module, "SECTION", None), Section)]
    assert len(found) == len(SECTIONS) >= 6 and all(section in SECTIONS for section in found)
    assert len({section.name for section in SECTIONS}) == len(SECTIONS)


def test_help_shows_every_flag_with_its_example(capsys) -> None:
    """Planted bugs: a flag without a help line; an example that names another command."""
    try:
        main(["--help"])
    except SystemExit as end:
        assert end.code == 0
    text = " ".join(capsys.readouterr().out.split())
    for section in SECTIONS:
        assert f"{section.flag} {section.metavar or ''}".strip() in text and section.help in text
        if section.example:
            words, meaning = section.example
            assert f"bnn-report {words} {meaning}" in text and section.flag in words
