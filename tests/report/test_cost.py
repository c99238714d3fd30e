"""Seconds of training, fit and evaluation next to the scores."""

from __future__ import annotations

import json

from bnn_runner.cli.report import main


def test_cost_is_reported_next_to_both_scores(write_cell, capsys, is_picture):
    """Planted bugs: a network from the cache costs nothing; the slow first run counts in full; one score left out."""
    for seed in range(3):
        for i, method in enumerate(("map", "laplace")):
            scores = [
                {"metric": "marginal_loglik", "value": -1.0 + i, "better": "higher"},
                {"metric": "dyadic_loglik", "value": -4.0 + i, "tau": 10, "kappa": 2, "better": "higher"},
            ]
            folder = write_cell(method, seed, scores, hash8=f"{i}000abcd")
            seconds = {"training": 0.0, "posterior": 2.0 * i, "evaluation": 1.0 + (0 if seed else 90)}
            facts = {"seconds": seconds, "training_seconds_when_trained": 5.0}
            (folder / "provenance.json").write_text(json.dumps(facts))
    assert main(["--output-dir", str(write_cell.outputs), "--cost"]) == 0
    text = capsys.readouterr().out
    rows = [line.split("|") for line in text.splitlines() if line.startswith(("| map ", "| laplace "))]
    assert [r[1].strip() for r in rows] == ["map", "laplace"]
    assert [[float(cell.split()[0]) for cell in r[3:9]] for r in rows] == [
        [5, 0, 1, 6, -1, -4],
        [5, 2, 1, 8, 0, -3],
    ]
    assert is_picture(write_cell.outputs / "results" / "comparison_cost.png")
    (folder / "provenance.json").unlink()
    assert main(["--output-dir", str(write_cell.outputs), "--cost", "method=laplace"]) == 2
