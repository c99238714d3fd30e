"""Citations follow the components in use: a class names its sources by `cites`, `citations.bib` holds the entries."""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import cache
from pathlib import Path

FILE = Path(__file__).with_name("citations.bib")


@cache
def entries() -> dict[str, str]:
    """BibTeX entry by key, in the order of `citations.bib`; entries begin with @ at the start of a line."""
    found = re.split(r"^(?=@)", FILE.read_text(encoding="utf-8"), flags=re.MULTILINE)
    return {text.partition("{")[2].partition(",")[0].strip(): text.strip() for text in found if text.startswith("@")}


def bibliography(components: Sequence[object], further: Sequence[str] = ()) -> str:
    """BibTeX of the sources of the components in use, and of further ones, each once.

    A component names its sources by `cites: ClassVar[tuple[str, ...]]`, keys of `citations.bib`. A class of another
    package may give whole BibTeX entries in their place.

    Args:
        components: the data set, model, method, rule and metrics of a run; those without `cites` add nothing.
        further: keys that a fit reports (`FitReport.cites`), say those of its curvature structure.
    """
    keys: dict[str, None] = {}
    for component in components:
        keys |= dict.fromkeys(getattr(component, "cites", ()))
    keys |= dict.fromkeys(further)
    return "\n\n".join(entries().get(key, key) for key in keys) + "\n"
