"""Joint log-likelihood of blocks of tau different test points."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from bnn_runner.metrics.block_scores import block_scores, point_scores
from bnn_runner.metrics.blocks import Blocks, permutations
from bnn_runner.metrics.checks import positive_integers
from bnn_runner.metrics.scores import not_available
from bnn_runner.scoring import Evaluation, Score


@dataclass(frozen=True)
class Joint:
    """`joint_loglik` per tau: mean over blocks of log sum_s w_s prod_{i in block} p(y_i | f_s(x_i)).

    Blocks are consecutive points of permutations of the test set that are the same for all methods;
    the remainder is dropped and counted in the note. tau = 1 is the marginal, and one draw gives tau times the
    marginal over the points used. Where the joint predictive is a known Gaussian the score is exact, and
    `joint_loglik_by_draws` is its estimate. Elsewhere it is estimated from draws, with a status (see `log_mean`).

    Attributes:
        taus: numbers of points per block.
        repeats: permutations that are averaged over.
        tolerance: nats per point of bias that are allowed even where the standard error is smaller.
    """

    taus: Sequence[int]
    repeats: int
    tolerance: float
    cites: ClassVar[tuple[str, ...]] = ("osband2022",)

    def __post_init__(self) -> None:
        positive_integers("joint", taus=self.taus, repeats=self.repeats)

    def __call__(self, evaluation: Evaluation, seed: int) -> list[Score]:
        test = evaluation.test
        if test.loglik is None:
            return []
        num_points = len(test.ids)
        orders = list(permutations(test.ids, self.repeats, seed, "joint"))
        scores: list[Score] = []
        for tau in self.taus:
            num_blocks = num_points // tau
            if num_blocks == 0:
                reason = f"a block of {tau} points requires more than the {num_points} test points"
                scores.append(not_available("joint_loglik", reason, tau=tau, better="higher", unit="nats per block"))
                continue
            if tau == 1:
                note = "the marginal"
                scores += point_scores("joint_loglik", evaluation, "test", tau=1, unit="nats per block", note=note)
                continue
            left = num_points - num_blocks * tau
            note = f"{self.repeats} permutations of {num_blocks} blocks, {left} points left over in each"
            blocks = [Blocks(order[: num_blocks * tau].reshape(num_blocks, tau)) for order in orders]
            scores += block_scores("joint_loglik", evaluation, blocks, tau, self.tolerance, note=note)
        return scores
