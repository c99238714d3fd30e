"""The objective of a search: the score that `objective=` names, found among the scores of an experiment.

Metrics are pure functions of an `Evaluation`. So a small random one shows, before anything is trained, which scores the
experiment has and which direction is better.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import torch

from bnn_runner.errors import UserError, did_you_mean
from bnn_runner.report.columns import Column, is_companion
from bnn_runner.report.read_cells import read_cell
from bnn_runner.rng import generator
from bnn_runner.scoring import Evaluation, GaussianJoint, Score, SplitEvaluation

if TYPE_CHECKING:
    from bnn_runner.experiment import Experiment


@dataclass(frozen=True)
class Objective:
    """One kind of score and which direction is better."""

    column: Column
    better: Literal["higher", "lower"]

    @property
    def name(self) -> str:
        """The name as typed: `val/marginal_loglik`, `test/joint_loglik_tau10`."""
        return _name(self.column)

    def read(self, cell: Path) -> float:
        """Returns the score of a cell; NaN if it has none (unfinished, n/a)."""
        score = read_cell(cell).main_scores.get(self.column)
        return float("nan") if score is None or score.status == "n/a" else score.value


def _name(column: Column) -> str:
    return f"{column.split}/{column.key.partition('@')[0]}"


def find_objective(text: str, experiment: Experiment) -> Objective:
    """Returns the objective that `text` names.

    Raises:
        UserError: If the experiment has no such score (the message lists its scores), or the score has no better
            direction.
    """
    split = text.rpartition("/")[0]
    if not split:
        raise UserError(f"objective must be split/score; got {text}. Write objective=val/{text}.")
    scores = [s for metric in experiment.metrics.values() for s in metric(_example_evaluation(experiment, split), 0)]
    better = {_name(c): (c, s.better) for s in scores if (c := _column(s)) is not None}
    if text not in better:
        ranked = {name: column for name, (column, direction) in better.items() if direction}
        listed = {(c.metric, c.split): name for name, c in reversed(ranked.items())}.values()  # only one block size
        no_val = split == "val" and experiment.data.spec().val_fraction == 0
        why = " There is no validation part: set data.val_fraction above 0." if no_val else ""
        raise UserError(
            f"objective={text} is not a score of this search.{did_you_mean(text, ranked)}{why} Scores: "
            f"{', '.join(sorted(listed))}."
        )
    column, direction = better[text]
    if direction not in ("higher", "lower"):
        raise UserError(f"objective={text} has no better direction (higher or lower). Choose another score.")
    return Objective(column, "higher" if direction == "higher" else "lower")


def _column(score: Score) -> Column | None:
    return None if is_companion(score.metric) else Column(score.metric, score.split, score.tau, score.kappa)


def _example_evaluation(experiment: Experiment, split: str) -> Evaluation:
    """A random evaluation of the experiment's kind with a few points and draws; has `split` if the data may have it."""
    spec = experiment.data.spec()
    names = ["test", *(["val"] if spec.val_fraction > 0 else [])]
    names += [split] if split.startswith(("ood/", "shift/")) else []
    draws, points, outputs = 4, 12, spec.num_outputs
    random = generator(0, "objective")

    def part(labelled: bool) -> SplitEvaluation:
        ids = torch.arange(points)
        loglik = torch.randn(draws, points, generator=random, dtype=torch.float64) if labelled else None
        if spec.kind == "classification":
            probs = torch.rand(points, outputs, generator=random, dtype=torch.float64)
            probs = probs / probs.sum(-1, keepdim=True)
            entropy = -(probs * probs.log()).sum(-1)
            targets = ids % outputs if labelled else None
            return SplitEvaluation(ids, loglik, targets, mean_probs=probs, mean_entropy=entropy / 2)
        means = torch.randn(draws, points, outputs, generator=random, dtype=torch.float64)
        targets = means.mean(0) + 1 if labelled else None
        return SplitEvaluation(ids, loglik, targets, means=means, variances=torch.ones_like(means))

    joint = GaussianJoint(torch.zeros(points).double(), torch.eye(points).double())
    return Evaluation(
        kind=spec.kind,
        predictive="draws",
        finite=experiment.method.finite,
        has_joint=True,
        log_weights=torch.zeros(draws, dtype=torch.float64),
        splits={name: part(not name.startswith("ood/")) for name in names},
        gaussian_joint=joint if spec.kind == "regression" and outputs == 1 else None,
    )
