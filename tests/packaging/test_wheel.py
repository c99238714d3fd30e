"""The wheel holds every module and every configuration file, and nothing else."""

from __future__ import annotations

import importlib.util
import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from importlib.metadata import version
from pathlib import Path

import pytest

import bnn_runner

ROOT = Path(__file__).parents[2]


def setuptools_is_new_enough() -> bool:
    """Whether a wheel can be built without fetching anything: PEP 639 licences need setuptools 77."""
    if importlib.util.find_spec("setuptools") is None or importlib.util.find_spec("build") is None:
        return False
    return int(version("setuptools").split(".")[0]) >= 77


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> zipfile.ZipFile:
    """Built from a copy, so that no build folder is left in the tree, nor read from it."""
    if not setuptools_is_new_enough():
        pytest.skip("needs build and setuptools 77 or newer: pip install -e '.[test]'")
    copy, out = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("dist")
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, copy)
    for name in ("bnn_runner", "conf", "tests", "scripts"):
        shutil.copytree(ROOT / name, copy / name, ignore=shutil.ignore_patterns("__pycache__"))
    command = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(out), str(copy)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    [path] = out.glob("*.whl")
    return zipfile.ZipFile(path)


def metadata(wheel: zipfile.ZipFile, name: str) -> str:
    [found] = [n for n in wheel.namelist() if n.endswith(f".dist-info/{name}")]
    return wheel.read(found).decode()


def test_every_file_is_inside_and_nothing_else(wheel: zipfile.ZipFile) -> None:
    sources = [
        p for p in (ROOT / "bnn_runner").rglob("*") if p.suffix in (".py", ".csv", ".bib") or p.name == "py.typed"
    ]
    expected = {p.relative_to(ROOT).as_posix() for p in sources}
    configs = [p for p in (ROOT / "conf").rglob("*") if p.suffix in (".yaml", ".py")]
    expected |= {f"bnn_runner/conf/{p.relative_to(ROOT / 'conf').as_posix()}" for p in configs}
    assert len(sources) > 50 and len(configs) > 40
    assert {"bnn_runner/report/published.csv", "bnn_runner/runs/citations.bib"} <= expected
    inside = {name for name in wheel.namelist() if ".dist-info/" not in name}
    assert inside == expected


def test_files_have_their_content(wheel: zipfile.ZipFile) -> None:
    assert wheel.read("bnn_runner/conf/config.yaml") == (ROOT / "conf" / "config.yaml").read_bytes()


def test_versions_agree(wheel: zipfile.ZipFile) -> None:
    [stated] = re.findall(r"^Version: (.+)$", metadata(wheel, "METADATA"), re.MULTILINE)
    assert stated == bnn_runner.__version__
    changelog = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    assert re.findall(r"^## \[(\d[^\]]*)\]", changelog, re.MULTILINE)[0] == stated
    assert f"version = {{{stated}}}" in (ROOT / "README.md").read_text(encoding="utf-8")


def test_commands_licence_and_dependencies(wheel: zipfile.ZipFile) -> None:
    entry_points = metadata(wheel, "entry_points.txt")
    assert "bnn-run = bnn_runner.cli.main:main" in entry_points
    assert "bnn-report = bnn_runner.cli.report:main" in entry_points
    assert "Apache License" in metadata(wheel, "licenses/LICENSE")
    described = metadata(wheel, "METADATA")
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    needed = re.findall(r"^Requires-Dist: ([^;\n]+)$", described, re.MULTILINE)
    assert sorted(map(str.strip, needed)) == sorted(project["dependencies"])
    assert f"Requires-Python: {project['requires-python']}" in described
