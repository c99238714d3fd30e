"""The house has layers: a package imports only what lies below it, no modules import each other in a circle.

Every import is read, those inside functions and under TYPE_CHECKING too. `LAYERS` is the order, lowest first; README.md
of `bnn_runner/` describes it. A new package gets a place here.
"""

from __future__ import annotations

import ast
from functools import cache
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[1] / "bnn_runner"

LAYERS = (
    {"_version", "errors", "rng"},
    {"runtime"},
    {"config"},
    {"tasks"},
    {"base"},
    {"scoring"},
    {"data", "models"},
    {"hyper"},
    {"training"},
    {"evaluation"},
    {"metrics", "posteriors"},
    {"curvature"},
    {"laplace"},
    {"marglik", "variational", "mcmc"},
    {"methods"},
    {"report"},
    {"loggers"},
    {"experiment"},
    {"testing"},
    {"runs"},
    {"runner"},
    {"api", "__init__"},
    {"sweeps"},
    {"cli"},
)

UPWARD = {
    ("base", "training.schedules"): "the annotation of FitContext.schedule",
    ("hyper.training_rule", "training.schedules"): "the annotation of TrainingRule's schedule",
    ("__init__", "api"): "bnn_runner.run and its kin, imported when first used",
}
"""Imports that go up, and why; the first two are under TYPE_CHECKING."""

ROOT_MODULES = 10


def modules(package: Path) -> dict[str, Path]:
    """Dotted names below the package ('runs.cell'), `__init__` files under the name of their folder."""
    found = {}
    for path in sorted(package.rglob("*.py")):
        parts = path.relative_to(package).with_suffix("").parts
        name = ".".join(parts[:-1] if parts[-1] == "__init__" and len(parts) > 1 else parts)
        found[name] = path
    return found


@cache
def imports(package: Path) -> list[tuple[str, str]]:
    """(importing module, imported module) for every import of the package's own modules."""
    known, found = modules(package), []
    for name, path in known.items():
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ImportFrom):
                assert node.level == 0, f"{path}: a relative import; write it out"
                targets = [f"{node.module}.{alias.name}" for alias in node.names]
            elif isinstance(node, ast.Import):
                targets = [alias.name for alias in node.names]
            else:
                continue
            for target in targets:
                head, _, rest = target.partition(".")
                if head != package.name:
                    continue
                while rest and rest not in known:  # an attribute of a module
                    rest = rest.rpartition(".")[0]
                if (imported := rest or "__init__") != name:
                    found.append((name, imported))
    return found


def top(module: str) -> str:
    return module.split(".")[0]


def upward(package: Path) -> list[tuple[str, str]]:
    """Imports across packages that do not go down."""
    rank = {name: i for i, layer in enumerate(LAYERS) for name in layer}
    return [
        (a, b)
        for a, b in imports(package)
        if top(a) != top(b) and rank[top(a)] <= rank[top(b)] and (a, b) not in UPWARD
    ]


def circles(package: Path) -> list[str]:
    """Modules that import themselves by way of others."""
    edges: dict[str, set[str]] = {}
    for a, b in imports(package):
        if (a, b) not in UPWARD:
            edges.setdefault(a, set()).add(b)

    def reached(start: str) -> set[str]:
        seen: set[str] = set()
        waiting = [start]
        while waiting:
            for module in edges.get(waiting.pop(), set()) - seen:
                seen.add(module)
                waiting.append(module)
        return seen

    return [name for name in edges if name in reached(name)]


def unplaced(package: Path) -> set[str]:
    """Packages and root modules without a layer, and layers without a package."""
    return {top(name) for name in modules(package)} ^ {name for layer in LAYERS for name in layer}


def test_a_package_imports_only_what_lies_below_it() -> None:
    assert upward(PACKAGE) == []


def test_no_modules_import_each_other_in_a_circle() -> None:
    assert circles(PACKAGE) == []


def test_every_package_has_a_layer() -> None:
    assert unplaced(PACKAGE) == set()


def test_the_imports_that_go_up_are_still_there() -> None:
    """An exception that nobody needs any more must leave the list."""
    assert set(UPWARD) <= set(imports(PACKAGE))


def test_the_root_is_small() -> None:
    assert len(list(PACKAGE.glob("*.py"))) <= ROOT_MODULES


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    """A copy of the package's source, to plant imports in."""
    for name, path in modules(PACKAGE).items():
        target = tmp_path / "bnn_runner" / path.relative_to(PACKAGE)
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(path.read_bytes())
        assert name
    return tmp_path / "bnn_runner"


@pytest.mark.parametrize(
    ("module", "line", "edge"),
    [
        (
            "curvature/psd.py",
            "from bnn_runner.laplace.evidence import log_evidence\n",
            ("curvature.psd", "laplace.evidence"),
        ),
        ("config/keys.py", "\n\ndef late():\n    from bnn_runner import runner\n", ("config.keys", "runner")),
        ("data/tables.py", "import bnn_runner.models.mlp\n", ("data.tables", "models.mlp")),
    ],
    ids=["at the top", "inside a function", "across one layer"],
)
def test_a_planted_import_is_found(copy: Path, module: str, line: str, edge: tuple[str, str]) -> None:
    path = copy / module
    path.write_text(path.read_text(encoding="utf-8") + line, encoding="utf-8")
    assert upward(copy) == [edge]


def test_a_planted_circle_and_a_planted_package_are_found(copy: Path) -> None:
    path = copy / "curvature" / "psd.py"
    path.write_text(path.read_text(encoding="utf-8") + "from bnn_runner.curvature.full import side\n")
    assert "curvature.psd" in circles(copy)
    (copy / "attic").mkdir()
    (copy / "attic" / "__init__.py").touch()
    assert unplaced(copy) == {"attic"}
