"""pyproject.toml names every package and every configuration folder: a forgotten one is missing from the wheel only."""

from __future__ import annotations

import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_every_package_is_listed() -> None:
    listed = set(tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["packages"])
    folders = {p.parent for p in (ROOT / "bnn_runner").rglob("*.py")}
    found = {".".join(folder.relative_to(ROOT).parts) for folder in folders}
    groups = {p.parent.relative_to(ROOT) for p in (ROOT / "conf").rglob("*.yaml")}
    found |= {".".join(("bnn_runner", *folder.parts)) for group in groups for folder in (group, *group.parents)[:-1]}
    assert found == listed
    assert all((folder / "__init__.py").is_file() for folder in folders), "a folder with code has no __init__.py"


def test_configuration_is_yaml_and_a_guide_only() -> None:
    others = [p for p in (ROOT / "conf").rglob("*") if p.is_file() and p.suffix not in (".yaml", ".pyc")]
    assert sorted(others) == [ROOT / "conf" / "README.md", ROOT / "conf" / "__init__.py"]
