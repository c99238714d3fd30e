"""What scripts/data_presets.py says about Laplace and its own network."""

from __future__ import annotations

from tests.scripts.loading import script

PRESETS = script("data_presets")


def row(marginal: str, dyadic: str, precision: str = "10", accuracy: str = "0.9") -> dict[str, str]:
    return {
        "marginal - network": marginal,
        "dyadic - network": dyadic,
        "validation: marginal - network": "+0.1 ± 0.2",
        "precision": precision,
        "map score": accuracy,
    }


def test_rows_are_counted_and_misses_explained() -> None:
    """Planted bugs: two errors of nothing that count; a loss within a large error; a regression that is counted."""
    text = "\n".join(
        PRESETS.summary(
            {
                "better": row("+0.1 ± 0.01", "+1 ± 0.1"),
                "unsure": row("-0.1 ± 0.09", "+1 ± 0.1"),
                "nothing": row("-0.0009 ± 1e-05", "+0.01 ± 0.001"),
                "worse": row("-0.1 ± 0.01", "+1 ± 0.1", accuracy="1"),
                "rigid": row("+0 ± 0", "-0.1 ± 0.1", precision="1e+06"),
                "yacht": {"precision": "1"},
            }
        )
    )
    assert "on 5 classification rows" in text and "0.001 nats on 4;" in text and "network's on 4." in text
    assert [line.split(":")[0] for line in text.splitlines() if line.startswith("- ")] == ["- worse", "- rigid"]
    assert "every test point is classified correctly" in text and "almost the network" in text
    assert PRESETS.summary({"yacht": {"precision": "1"}}) == []
