"""The sections that a report can have, in their order on the page. A new one is a file with a `SECTION`, named here."""

from __future__ import annotations

from bnn_runner.report import (
    centre,
    cost,
    equivalents,
    evidence,
    marginal_dyadic,
    paired,
    published,
    ranks,
    rates,
    structures,
)
from bnn_runner.report.section import Section

SECTIONS: tuple[Section, ...] = (
    paired.SECTION,
    centre.SECTION,
    ranks.SECTION,
    equivalents.SECTION,
    evidence.SECTION,
    structures.SECTION,
    cost.SECTION,
    rates.SECTION,
    marginal_dyadic.SECTION,
    published.SECTION,
)
