"""What a run says of its evidence."""

from bnn_runner.runs.messages import evidence_line


def test_the_evidence_line_tells_the_prior_and_a_noise_that_was_chosen():
    report = {"evidence_nats": -3.2, "structure": "full", "hyper_status": "converged", "prior_precision": 0.31}
    assert evidence_line(report) == (
        "log evidence -3.20 nats over all weights (full, prior precision 0.31, hyper converged)"
    )
    more = {"hyper_family": "g", "noise": "evidence", "noise_sigma": [0.5, 0.25]}
    assert "prior precision 0.31 x diag(H)/N, noise 0.5, 0.25, hyper" in evidence_line(report | more)
    assert "prior precision" not in evidence_line(report | {"prior_precision": None})
    validated = report | {"selected_by": "validation", "evidence_nats": -9.8e7}
    assert evidence_line(validated) == (
        "posterior over all weights (full, prior precision 0.31, selected on validation data: converged)"
    )
