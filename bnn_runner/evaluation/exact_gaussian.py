"""Regression posteriors whose predictive is a Gaussian: exact log-densities of points, and the exact joint.

Both stand next to scores from draws, which are their estimates. All numbers are in original target
units: y_original = shift + scale * y.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Protocol, cast

import torch
from torch import Tensor

from bnn_runner.base import ClosedForm, Posterior
from bnn_runner.errors import UserError
from bnn_runner.evaluation.closed_form import gaussian_log_prob, variances, widest_on_device
from bnn_runner.runtime.memory import TooLarge
from bnn_runner.scoring import GaussianJoint, SplitEvaluation
from bnn_runner.tasks import Split, Task

JOINT_POINTS = 2_000  # the exact Gaussian joint is kept up to this many test points (an [N, N] matrix)


class _MeanVariance(Protocol):
    """What evaluation needs of a regression likelihood in addition to `log_prob`."""

    def mean_variance(self, outputs: Tensor) -> tuple[Tensor, Tensor]: ...


def regression_piece(task: Task, posterior: ClosedForm, x: Tensor, y: Tensor | None) -> tuple[SplitEvaluation, int]:
    """The Gaussian predictive at a batch of points, and how many slightly negative variances were repaired.

    Raises `UserError` where the network's output is not the mean of the target.
    """
    moments = posterior.moments(x)
    mean, covariance = widest_on_device(moments.mean), widest_on_device(moments.covariance)
    epistemic, repaired = variances(covariance)
    likelihood = cast(Posterior, posterior).likelihood
    centre, noise = cast(_MeanVariance, likelihood).mean_variance(mean)
    if centre.shape != mean.shape:
        raise UserError(
            "method.predict=closed_form requires outputs that are the mean of the target; under this likelihood.form "
            "they are not, so the predictive is not Gaussian. Use method.predict=draws."
        )
    noise = noise.expand(mean.shape)
    shift, scale = widest_on_device(task.target_mean), widest_on_device(task.target_scale)
    wide_y = None if y is None else widest_on_device(y)
    loglik = None
    if wide_y is not None:
        loglik = gaussian_log_prob(wide_y, mean, covariance + torch.diag_embed(noise)) - scale.log().sum()
    piece = SplitEvaluation(
        ids=torch.empty(0),
        loglik=None if loglik is None else loglik.unsqueeze(0),
        targets=None if wide_y is None else shift + scale * wide_y,
        means=(shift + scale * mean).unsqueeze(0),
        variances=(scale.square() * (epistemic + noise)).unsqueeze(0),
        epistemic=scale.square() * epistemic,
    )
    return piece, repaired


def gaussian_joint(task: Task, posterior: Posterior, batch_size: int) -> tuple[GaussianJoint | None, tuple[str, ...]]:
    """The exact joint predictive of the test targets, where the posterior over functions is Gaussian; and notes."""
    if task.spec.kind != "regression" or task.test.targets is None or task.test.targets.shape[-1] != 1:
        return None, ()
    if not isinstance(posterior, ClosedForm):
        return None, ()
    if len(task.test) > JOINT_POINTS:
        return None, (
            f"no exact Gaussian joint for {len(task.test)} test points: it is computed for at most {JOINT_POINTS}",
        )
    means = torch.cat([widest_on_device(posterior.moments(x).mean) for x, _ in task.test.batches(batch_size)])
    centre, noise = cast(_MeanVariance, posterior.likelihood).mean_variance(means)
    if centre.shape != means.shape:
        return None, ("no exact Gaussian joint: the likelihood's mean is not the network's output",)
    try:
        outputs = widest_on_device(posterior.joint_covariance(task.test))
    except TooLarge as error:
        return None, (f"no exact Gaussian joint: {error}",)
    noise = noise.expand(means.shape).squeeze(-1)
    covariance = outputs + torch.diag(noise)
    shift, scale = task.target_mean.cpu().double(), task.target_scale.cpu().double()
    mean = (shift + scale * means.cpu().double()).squeeze(-1)
    square = scale.square()
    return GaussianJoint(mean, square * covariance.cpu().double(), square * noise.cpu().double()), ()


def with_exact_logliks(
    task: Task,
    posterior: Posterior,
    splits: Mapping[str, Split],
    scored: Mapping[str, SplitEvaluation],
    joint: GaussianJoint | None,
    batch_size: int,
) -> dict[str, SplitEvaluation]:
    """The scored splits with `exact_loglik`, where the posterior's predictive is a Gaussian at every point.

    The test split has it already where there is the exact joint of its points.
    """
    found = dict(scored)
    if task.spec.kind != "regression" or not isinstance(posterior, ClosedForm):
        return found
    for name, split in splits.items():
        if split.targets is None or (name == "test" and joint is not None):
            continue
        try:
            pieces = [regression_piece(task, posterior, x, y)[0].loglik for x, y in split.batches(batch_size)]
        except (UserError, TooLarge):  # the likelihood has no Gaussian predictive, or its moments need too much memory
            return found
        exact = torch.cat([piece[0] for piece in pieces if piece is not None])
        found[name] = replace(found[name], exact_loglik=exact.cpu().double())
    return found
