"""The papers of what a fit of linearised Laplace used beyond what its method names."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

SCALE_INVARIANCE = ("antoran2022",)
"""The evidence at the tangent model's optimum, and one precision for each scale-invariant group of weights."""


def sources(facts: Mapping[str, Any]) -> tuple[str, ...]:
    """BibTeX keys, from the facts of the row: those of the tangent optimum and of groups by scale invariance."""
    return SCALE_INVARIANCE if facts.get("mode") == "tangent" or facts.get("scale_invariant") else ()
