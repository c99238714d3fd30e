"""Every key that a component cites has its entry, and every entry is cited by a component."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

import bnn_runner.methods
from bnn_runner.config.groups import GLOBAL_GROUPS
from bnn_runner.curvature.structures import STRUCTURES
from bnn_runner.experiment.components import locate
from bnn_runner.laplace.sources import SCALE_INVARIANCE, sources
from bnn_runner.models.likelihoods import SOURCES, NoiseRule
from bnn_runner.runs.citations import FILE, bibliography, entries
from tests.choices import CATALOGUE, METHODS, choices, make, target

GROUPS = [group for group in CATALOGUE.groups if group not in GLOBAL_GROUPS]
COMPONENTS = [(g, c) for g in GROUPS for c in choices(g) if (g, c) != ("model", "module")]


def keys(component: Any) -> tuple[str, ...]:
    return tuple(getattr(component, "cites", ()))


def cited() -> dict[str, str]:
    """Key -> a choice or structure that cites it."""
    found: dict[str, str] = {}
    for group, choice in COMPONENTS:
        found |= dict.fromkeys(keys(make(group, choice)), f"{group}={choice}")
    for structure, spec in STRUCTURES.items():
        found |= dict.fromkeys(spec.cites, f"structure {structure}")
    found |= dict.fromkeys((key for keys in SOURCES.values() for key in keys), "likelihood.form")
    found |= dict.fromkeys(SCALE_INVARIANCE, "method.mode=tangent")
    return found


def test_runs_cite_what_they_use() -> None:
    """Planted bugs: a form of the noise without its papers; the paper of v* in every run, or in none."""
    assert keys(NoiseRule(form="natural")) == ("immer2023",) and not keys(NoiseRule())
    assert sources({"mode": "tangent"}) == ("antoran2022",) and not sources({"mode": "network", "scale_invariant": []})


def test_every_key_has_an_entry_and_every_entry_is_cited() -> None:
    """Planted bugs: a misspelt key in a class; an entry left behind; one entry swallowed by the one before."""
    assert set(cited()) == set(entries()), set(cited()) ^ set(entries())
    text = FILE.read_text(encoding="utf-8")
    written = re.findall(r"^@\w+\{(\w+),$", text, re.MULTILINE)
    assert written == sorted(written) == list(entries()) and len(written) == text.count("@") > 40
    for key, entry in entries().items():
        assert entry.count("{") == entry.count("}") and re.search(r"year = \{\d{4}\}\}$", entry), key
        assert all(f"{field} = {{" in entry for field in ("author", "title", "year")), key


@pytest.mark.parametrize("name", METHODS)
def test_every_method_names_its_sources(name: str) -> None:
    """Planted bug: a method without `cites`."""
    method = make("method", name)
    assert keys(method), f"{target('method', name)} has no cites: name its papers by their keys in {FILE.name}"
    text = bibliography([method, method])
    assert [text.count(f"{{{key},") for key in keys(method)] == [1] * len(keys(method))


def test_structures_and_outside_classes_are_cited() -> None:
    """Planted bugs: EKFAC's paper for KFAC; an outside class's own entry looked up and lost."""
    text = bibliography([], STRUCTURES["kfac"].cites)
    assert all(key in text for key in ("martens2015", "botev2017", "grosse2016")) and "george2018" not in text
    assert bibliography([], STRUCTURES["diag"].cites).strip() == ""

    class Outside:
        cites = ("@misc{me, title = {Mine}}", "neal2011")

    assert bibliography([Outside()]).startswith("@misc{me") and "Neal, Radford" in bibliography([Outside()])


def test_the_class_of_every_method_file_is_in_methods() -> None:
    """The check above sees every class of methods/."""
    classes = {locate(CATALOGUE.load("method", name)["_target_"], (), "method") for name in METHODS}
    modules = {cls.__module__.rpartition(".")[2] for cls in classes}
    folder = Path(bnn_runner.methods.__path__[0])
    assert modules == {path.stem for path in folder.glob("*.py")} - {"__init__"}
