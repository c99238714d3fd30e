"""The sections that a report can have, in their order on the page. A new one is a file with a `SECTION`, named here."""

from __future__ import annotations

from bnn_runner.report import cost, equivalents, evidence, paired, published, ranks, rates
from bnn_runner.report.section import Section

SECTIONS: tuple[Section, ...] = (
    paired.SECTION,
    ranks.SECTION,
    equivalents.SECTION,
    evidence.SECTION,
    cost.SECTION,
    rates.SECTION,
    published.SECTION,
)
