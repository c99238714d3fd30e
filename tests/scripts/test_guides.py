"""The guides scripts/README.md and tests/README.md name what there is."""

from __future__ import annotations

import re

from tests.scripts.loading import SCRIPTS

TESTS = SCRIPTS.parent / "tests"


def test_every_script_is_in_the_guide() -> None:
    """Planted bugs: a new script without a line; a renamed one."""
    text = (SCRIPTS / "README.md").read_text(encoding="utf-8")
    named = set(re.findall(r"`([\w/]+\.(?:py|sh|yaml))`", text))
    assert named == {path.name for path in SCRIPTS.iterdir() if path.suffix in (".py", ".sh", ".yaml")}


def test_the_guide_of_the_tests_names_files_that_are_there() -> None:
    text = (TESTS / "README.md").read_text(encoding="utf-8")
    named = set(re.findall(r"`([\w/]+\.py)`", text))
    roots = (TESTS, SCRIPTS.parent)
    assert len(named) >= 8
    assert not [name for name in named if not any((root / name).is_file() for root in roots)]
