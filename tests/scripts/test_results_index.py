"""outputs/results/README.md lists every kept table and figure once, with the command that makes it."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.scripts.loading import SCRIPTS, script

RESULTS = SCRIPTS.parent / "outputs" / "results"


def test_the_index_is_up_to_date_and_complete() -> None:
    """Planted bugs: a new figure that nobody lists; a file that two presets claim; a thumbnail of another file."""
    made = script("results_index")
    text = (RESULTS / made.INDEX).read_text(encoding="utf-8")
    assert text == made.index(RESULTS), "run: python scripts/results_index.py"
    kept = sorted(path.name for path in RESULTS.iterdir() if path.name not in (made.INDEX, ".gitkeep"))
    assert len(kept) > 90
    assert sorted(re.findall(r"\]\(([^)/]+)\)", text)) == kept
    assert sorted(re.findall(r'<img src="([^"]+)"', text)) == [name for name in kept if name.endswith(".png")]
    for command in re.findall(r"^`python ([^ `]+)", text, re.MULTILINE):
        assert (SCRIPTS.parent / command).is_file(), command


def test_files_go_to_the_longest_name_and_unknown_ones_are_refused(tmp_path: Path) -> None:
    made = script("results_index")
    groups = made.presets()
    for name, group in {
        "heteroscedastic_pictures.png": "heteroscedastic",
        "heteroscedastic_uci.csv": "heteroscedastic_uci",
        "mcmc_mixture.png": "mcmc_targets",
        "uci_mc_dropout_tables.csv": "uci_mc_dropout",
    }.items():
        assert made.owner(tmp_path / name, groups).name == group
    with pytest.raises(ValueError, match=r"new\.png belongs to no command"):
        made.owner(tmp_path / "new.png", groups)
