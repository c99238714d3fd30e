"""Whether a posterior is worse than its centre on the validation part, for the row and for a reader."""

from __future__ import annotations

import math
from typing import Any

from bnn_runner.experiment import Experiment
from bnn_runner.metrics.marginal import validation_against_centre
from bnn_runner.report.student import quantile
from bnn_runner.scoring import Evaluation

WORSE, LEVEL = 2.0, 0.05
"""Paired standard errors below its centre at which a posterior gets a note; with few points, Student's quantile."""


def against_centre(evaluation: Evaluation, experiment: Experiment) -> tuple[dict[str, Any], list[str]]:
    """Facts and notes of the comparison; both empty where the posterior has no centre or there is no validation part.

    The score is the marginal log-likelihood, and its standard error that of the difference over the same points.
    """
    found = validation_against_centre(evaluation)
    if found is None:
        return {}, []
    own, centre, apart = found
    limit = max(WORSE, quantile(LEVEL, apart.n - 1)) if apart.n > 1 else math.inf
    worse = apart.value < -limit * apart.standard_error
    facts = {
        "val_loglik": own.value,
        "centre_val_loglik": centre.value,
        "val_loglik_minus_centre": apart.value,
        "val_loglik_minus_centre_se": apart.standard_error,
        "worse_than_centre": worse,
    }
    if not worse:
        return facts, []
    note = (
        "the posterior is worse than its centre on the validation part: marginal log-likelihood "
        f"{own.value:.3f} against {centre.value:.3f} nats per point, a difference of {apart.value:.3f} ± "
        f"{apart.standard_error:.2g} ({apart.n} points, paired). Better there: the centre itself"
    )
    rule = experiment.hyper if experiment.uses_hyper else None
    if rule is not None:  # a method of hyper rules is Laplace's, whose centre is the MAP network
        note += " (method=map)"
        if not rule.needs_validation:
            note += "; hyper=grid selects the prior precision on that part"
    return facts, [note]
