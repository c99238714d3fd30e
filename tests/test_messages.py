"""Messages, help lines and notes are plain English: no text of the program has a word that `wording` forbids.

What a run prints, and every error that a test provokes, is looked at by the fixture `plain_messages` in each test;
here the texts in the code and the comments of the YAML files are.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

from bnn_runner.errors import UserError
from tests.wording import problems_of

ROOT = Path(__file__).parents[1]


def docstrings(tree: ast.AST) -> set[int]:
    """Identities of the constants that are docstrings, or texts under a constant or field."""
    return {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}


def texts(path: Path) -> Iterator[tuple[int, str]]:
    """Line and text of every string that is no docstring and has at least two words; pieces of one are put together."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    apart, inside = docstrings(tree), set()
    for node in ast.walk(tree):
        if isinstance(node, ast.JoinedStr) and id(node) not in inside:
            inside |= {id(part) for part in ast.walk(node)}
            pieces = [part.value if isinstance(part, ast.Constant) else "{}" for part in node.values]
            yield node.lineno, "".join(map(str, pieces))
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in apart | inside:
            yield node.lineno, node.value


def test_texts_of_the_code_are_plain() -> None:
    found = []
    for path in sorted((ROOT / "bnn_runner").rglob("*.py")) + sorted((ROOT / "scripts").glob("*.py")):
        for line, text in texts(path):
            found += [f"{path.relative_to(ROOT)}:{line}: {p}: {text[:100]}" for p in problems_of(text) if " " in text]
    assert not found, "\n".join(found)


def test_comments_of_yaml_files_are_plain() -> None:
    found = []
    for path in [*sorted((ROOT / "conf").rglob("*.yaml")), ROOT / "scripts" / "presets.yaml"]:
        for i, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
            found += [f"{path.relative_to(ROOT)}:{i}: {p}: {line.strip()}" for p in problems_of(line)]
    assert not found, "\n".join(found)


def test_the_rule_finds_what_it_forbids() -> None:
    """Planted bugs: a word inside another one; a message without an end."""
    assert problems_of("method.chains=0 cannot be.") and problems_of("It is made anew.") and problems_of("null is none")
    assert not problems_of("Amend the recommended value.") and not problems_of("the untold story")
    assert problems_of("method.chains must be at least 1", sentences=True)
    assert not problems_of("method.chains must be at least 1; got 0.", sentences=True)


def test_every_error_of_a_test_is_looked_at(request: pytest.FixtureRequest) -> None:
    """Planted bug: a fixture that collects nothing."""
    assert "plain_messages" in request.fixturenames
    with pytest.raises(UserError):
        raise UserError("X must be 1; got 2.")
