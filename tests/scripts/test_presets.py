"""presets.yaml: what its tables show is checked, never typed."""

from __future__ import annotations

import re

import pytest

from bnn_runner.config.groups import Catalogue
from bnn_runner.report.claims import Claim
from tests.scripts.loading import script

PRESETS = script("reproduce").presets()
TYPED = r"\b(higher|lower|above|below|worse|better|best|worst|holds?|agrees?|reproduced|costs? \d|within the tol\w+)\b"
"""Words of a statement about the numbers of a table."""


@pytest.mark.parametrize("name", PRESETS)
def test_no_statement_about_the_numbers_is_typed(name):
    """Planted bug: "the order holds" in `shows`, which stays there when it does not hold any more."""
    found = re.findall(TYPED, PRESETS[name].shows)
    assert not found, f"{name}: make it a claim: {found}"


@pytest.mark.parametrize("name", [name for name, preset in PRESETS.items() if preset.claims])
def test_claims_can_be_checked(name):
    """Planted bugs: a misspelt method or field, so that a claim is "not run" for ever; claims of a script."""
    preset, catalogue = PRESETS[name], Catalogue()
    assert preset.run, "claims are checked on cells"
    for claim in (Claim(**c) for c in preset.claims):
        assert all(isinstance(name, str) for name in claim.order), claim
        if claim.by == "method":
            assert set(claim.order) <= set(catalogue.choices("method")), claim
        else:
            assert claim.by.split(".")[0] in ("model", "schedule", "likelihood", "data", "prior", "hyper"), claim
        assert all(isinstance(value, str) for value in claim.where.values()), claim
