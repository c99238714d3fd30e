"""Claims under a table are the outcome of a test on its numbers."""

from __future__ import annotations

import json

import pytest

from bnn_runner.errors import UserError
from bnn_runner.report.claims import Claim, claim_lines
from bnn_runner.report.read_cells import find_cells


@pytest.fixture
def runs(write_cell):
    """Three seeds each; laplace by two rules, and MAP with 5 and 40 epochs."""

    def put(method, value, place, **more):
        for seed in range(3):
            score = {"metric": "marginal_loglik", "value": value + 0.01 * seed * place, "better": "higher"}
            folder = write_cell(method, seed, [score | {"standard_error": 0.01}], hash8=f"{place}000abcd", **more)
            facts = json.loads((folder / "cell.json").read_text())
            facts["report"] = {"evidence_nats": 100 * value + seed}
            (folder / "cell.json").write_text(json.dumps(facts))

    put("map", -1.0, 1)
    put("map", -2.0, 2, config={"schedule.epochs": 5})
    put("laplace", -0.5, 3, choices={"hyper": "grid"}, config={"hyper._target_": "grid"})
    put("laplace", -1.5, 4, choices={"hyper": "evidence"}, config={"hyper._target_": "evidence"})
    put("swag", -1.001, 5)
    return write_cell


def lines(runs, *claims):
    return claim_lines(find_cells(runs.outputs), claims)


def test_outcomes_follow_the_numbers(runs):
    """Planted bugs: a claim that is printed as typed; one rule's row for the other's; one outcome for all rows."""
    long = {"schedule.epochs": "100"}
    found = lines(runs, Claim(["laplace", "map"], "marginal_loglik", where=long))
    assert len(found) == 2
    assert "hyper=evidence: marginal_loglik: laplace > map: **does not hold**" in found[0]
    assert "hyper=grid: marginal_loglik: laplace > map: **holds** (laplace − map = 0.52 ± 0.018 (n = 3))." in found[1]
    (found,) = lines(runs, Claim(["swag", "map"], "marginal_loglik", where=long))
    assert "**undecided**" in found
    (found,) = lines(runs, Claim(["swag", "map"], "marginal_loglik", where=long, margin=0.5))
    assert "(or less by at most 0.5): **holds**" in found


def test_orders_of_settings_facts_and_numbers(runs):
    (found,) = lines(runs, Claim(["100", "5"], "marginal_loglik", "schedule.epochs", {"method": "map"}))
    assert "marginal_loglik by schedule.epochs: 100 > 5: **holds**" in found
    (found,) = lines(runs, Claim(["100", "5"], "evidence_nats", "schedule.epochs", {"method": "map"}))
    assert "**undecided**" in found, "both rise by 1 each seed: the difference has no error, and three seeds agree"
    (found,) = lines(runs, Claim(["map", "-1.5"], "marginal_loglik", where={"schedule.epochs": "100"}))
    assert "map > -1.5: **holds**" in found


def test_what_has_not_run_or_not_converged_says_so(runs):
    """Planted bug: an order of four methods that holds, because two of them are missing."""
    assert lines(runs, Claim(["hmc", "sgld"], "rmse")) == ["rmse: hmc > sgld: not run at this size."]
    (found,) = lines(runs, Claim(["hmc", "swag", "map"], "marginal_loglik", where={"schedule.epochs": "100"}))
    assert "; hmc not run at this size" in found
    for seed in range(3):
        score = {"metric": "marginal_loglik", "value": -0.1, "standard_error": 0.01, "status": "not converged"}
        runs("sgld", seed, [score], hash8="7000abcd")
    (found,) = lines(runs, Claim(["sgld", "swag"], "marginal_loglik"))
    assert "**not judged, because a score has not converged**" in found
    with pytest.raises(UserError, match="at least two"):
        Claim(["map"], "rmse")
