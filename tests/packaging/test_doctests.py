"""The examples in docstrings are true: the Python side's runs, in an empty folder."""

from __future__ import annotations

import doctest
import importlib
import subprocess
import sys
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[2] / "bnn_runner"
WITH_EXAMPLES = [p for p in PACKAGE.rglob("*.py") if ">>> " in p.read_text(encoding="utf-8")]
MODULES = sorted(".".join(p.relative_to(PACKAGE.parent).with_suffix("").parts) for p in WITH_EXAMPLES)


def test_there_are_some() -> None:
    assert {"bnn_runner.api", "bnn_runner.runs.predictor", "bnn_runner.data.table_numbers"} <= set(MODULES)


@pytest.mark.parametrize("name", MODULES)
def test_examples_are_true(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    found = doctest.testmod(importlib.import_module(name), optionflags=doctest.ELLIPSIS)
    assert found.attempted > 0 and found.failed == 0


def test_importing_the_package_imports_nothing_heavy() -> None:
    program = "import sys, bnn_runner; assert not {'torch', 'hydra', 'pandas', 'numpy'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", program], check=True, cwd=PACKAGE.parent)
