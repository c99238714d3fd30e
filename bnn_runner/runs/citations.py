"""Citations follow the components in use: a class names its sources by `cites`, `citations.bib` holds the entries."""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import cache
from pathlib import Path

FILE = Path(__file__).with_name("citations.bib")

BY_STRUCTURE: dict[str, tuple[str, ...]] = {
    "kfac": ("martens2015", "botev2017", "grosse2016"),
    "ekfac": ("martens2015", "botev2017", "grosse2016", "george2018"),
    "low_rank": ("halko2011", "gittens2016"),
}
"""Of the curvature structures that a posterior's report may name."""


@cache
def entries() -> dict[str, str]:
    """BibTeX entry by key, in the order of `citations.bib`; entries begin with @ at the start of a line."""
    found = re.split(r"^(?=@)", FILE.read_text(encoding="utf-8"), flags=re.MULTILINE)
    return {text.partition("{")[2].partition(",")[0].strip(): text.strip() for text in found if text.startswith("@")}


def bibliography(components: Sequence[object], structure: str = "") -> str:
    """BibTeX of the sources of the components in use and of the posterior's curvature structure, each once.

    A component names its sources by `cites: ClassVar[tuple[str, ...]]`, keys of `citations.bib`. A class of another
    package may give whole BibTeX entries in their place.

    Args:
        components: the data set, model, method, rule and metrics of a run; those without `cites` add nothing.
        structure: the curvature structure that the posterior reports, "" for none.
    """
    keys: dict[str, None] = {}
    for component in components:
        keys |= dict.fromkeys(getattr(component, "cites", ()))
    keys |= dict.fromkeys(BY_STRUCTURE.get(structure, ()))
    return "\n\n".join(entries().get(key, key) for key in keys) + "\n"
