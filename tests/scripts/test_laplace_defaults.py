"""The page of scripts/laplace_defaults.py: which rule its validation columns make the default."""

from __future__ import annotations

from typing import Any

import pytest

from tests.scripts.loading import script

PAGE = script("laplace_defaults_page")
RULES = {"timid": (0.0, 0.1), "good": (-0.01, 1.0), "bold": (-0.2, 5.0)}
"""Validation differences of the marginal (its error is 0.02) and of the dyadic score."""


def rows(changes: dict[tuple[str, str], dict[str, float]] | None = None) -> list[dict[str, Any]]:
    found = []
    for data in ("a", "b"):
        for rule, (marginal, dyadic) in RULES.items():
            for seed in (0, 1):
                row = {"data": data, "model": "mlp", "seed": seed, "structure": "auto", "rule": rule, "note": ""}
                row |= {"precision": 1.0, "temperature": 1.0, "seconds": 2.0, "test_accuracy": 0.0}
                for part in ("validation", "test"):
                    row |= {f"{part}_marginal": marginal, f"{part}_marginal_error": 0.02}
                    row |= {f"{part}_dyadic": dyadic, f"{part}_dyadic_error": 0.1}
                found.append(row | (changes or {}).get((data, rule), {}))
    return found


def chosen(found: list[dict[str, Any]]) -> str:
    return PAGE.choice(PAGE.by_rule(PAGE.main_structure(PAGE.means(found))))


def test_the_choice_gains_most_without_losing() -> None:
    """Planted bugs: the largest gain whatever it costs; the safest rule whatever it gains."""
    assert chosen(rows()) == "good"
    assert chosen(rows({("b", "good"): {"validation_marginal": -0.05}})) == "timid"


def test_the_test_columns_choose_nothing() -> None:
    other = {"test_marginal": -9.0, "test_dyadic": -9.0}
    assert chosen(rows({(d, "good"): other for d in "ab"})) == "good"


def test_seeds_share_points_and_a_rule_that_was_not_run_everywhere_is_not_chosen() -> None:
    found = rows()
    mean = next(m for m in PAGE.means(found) if m.rule == "good")
    assert mean.seeds == 2 and mean.error("validation_marginal") == pytest.approx(0.02)
    assert chosen([r for r in found if (r["data"], r["rule"]) != ("b", "good")]) == "timid"


def test_the_page_names_the_choice_and_the_default() -> None:
    text = PAGE.page(rows())
    assert "**good**" in text and PAGE.default_rule() in text and "| good | 2 | -0.0100 | 0 | +1.000 | 2 |" in text
