"""A new curvature structure is its own file, one entry of the table, one YAML file and a word of documentation."""

from __future__ import annotations

import filecmp
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
WORDS = ["data=gap1d", "debug=fast", "metric=[marginal]", "figures=false", "threads=1"]
FIT = '''
"""H = (tr H / P) I: every weight has the mean curvature."""

from __future__ import annotations

import torch

from bnn_runner.curvature.block_curvature import BlockCurvature
from bnn_runner.curvature.block_fits import fit_diagonal
from bnn_runner.curvature.blocks import DiagonalBlock
from bnn_runner.curvature.training_passes import TrainingPasses


def fit_scalar(passes: TrainingPasses) -> BlockCurvature:
    exact = fit_diagonal(passes.jacobians, passes.factor_batches)
    mean = torch.cat([block.spectrum for block in exact.blocks]).mean()
    blocks = tuple(DiagonalBlock(torch.full_like(block.spectrum, float(mean))) for block in exact.blocks)
    return BlockCurvature(exact.groups, blocks, exact.sizes, exact.dtype, exact.device)
'''
ENTRY = """
    "scalar": StructureSpec(
        fit=fit_scalar,
        treatment=_always("mean curvature of all weights"),
        families=frozenset({"parameter"}),
        in_training=True,
        cites=("mackay1992",),
    ),
"""
YAML = """# Linearised Laplace with one curvature for all weights
defaults:
  - laplace
  - _self_

structure: scalar
"""
MOST_FILES = 4


@pytest.fixture(scope="module")
def house(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the source tree with the new structure."""
    copy = tmp_path_factory.mktemp("house")
    for folder in ("bnn_runner", "conf"):
        shutil.copytree(ROOT / folder, copy / folder, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "pyproject.toml", copy)
    (copy / "bnn_runner/curvature/scalar.py").write_text(FIT.lstrip())
    (copy / "conf/method/laplace_scalar.yaml").write_text(YAML)
    edit(copy / "bnn_runner/curvature/structures.py", "STRUCTURES: dict[str, StructureSpec] = {\n", ENTRY.lstrip("\n"))
    edit(
        copy / "bnn_runner/curvature/structures.py",
        "from bnn_runner.curvature.low_rank import fit_low_rank\n",
        "from bnn_runner.curvature.scalar import fit_scalar\n",
    )
    edit(copy / "conf/method/laplace.yaml", "# auto, full, ", "scalar, ")
    return copy


def edit(path: Path, after: str, text: str) -> None:
    old = path.read_text(encoding="utf-8")
    assert old.count(after) == 1, path
    path.write_text(old.replace(after, after + text), encoding="utf-8")


def touched(copy: Path) -> list[str]:
    """Files that differ from the source tree's or are new."""
    files = [p for folder in ("bnn_runner", "conf") for p in (copy / folder).rglob("*") if p.is_file()]
    names = [p.relative_to(copy) for p in files if "__pycache__" not in p.parts]
    return [str(n) for n in names if not (ROOT / n).is_file() or not filecmp.cmp(ROOT / n, copy / n, shallow=False)]


def run(copy: Path, *words: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": str(copy), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", "from bnn_runner.cli.main import main; main()", *words]
    return subprocess.run(command, cwd=copy, env=environment, capture_output=True, text=True, timeout=300)


def test_few_files_are_touched(house: Path) -> None:
    assert len(touched(house)) <= MOST_FILES, touched(house)


@pytest.mark.parametrize(
    "word", ["method=laplace_scalar", pytest.param("method.structure=scalar", marks=pytest.mark.exhaustive)]
)
def test_the_new_structure_runs(house: Path, word: str) -> None:
    """By its YAML file and by the key; its words and sources are in the cell."""
    output = house / word.replace("=", "_")
    done = run(house, *WORDS, word, f"output_dir={output}")
    assert done.returncode == 0, done.stderr + done.stdout
    (cell,) = (p.parent for p in output.rglob("DONE"))
    report = json.loads((cell / "cell.json").read_text())["report"]
    assert report["structure"] == "scalar" and report["evidence_nats"] < 0
    treatment = json.loads((cell / "provenance.json").read_text())["treatment"]
    assert set(treatment.values()) == {"mean curvature of all weights"}
    assert "mackay1992" in (cell / "citations.bib").read_text()


@pytest.mark.exhaustive
def test_the_table_alone_says_what_it_supports(house: Path) -> None:
    """Refused before anything runs where the entry does not name it, accepted where it does."""
    refused = run(house, *WORDS, "method.structure=scalar", "hyper.family=g", "hyper=fixed")
    assert refused.returncode == 2 and "method.structure=scalar does not support hyper.family=g" in refused.stderr
    unknown = run(house, *WORDS, "method.structure=skalar")
    assert unknown.returncode == 2 and "scalar" in unknown.stderr
    output = house / "parameter"
    words = ["method.structure=scalar", "hyper=evidence", "hyper.family=parameter", f"output_dir={output}"]
    assert run(house, *WORDS, *words).returncode == 0
    trained = run(house, *WORDS, "method=map", "hyper=online", "hyper.structure=scalar", f"output_dir={output}")
    assert trained.returncode == 0, trained.stderr
