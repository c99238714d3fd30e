"""Predictions with uncertainty for new points, as a table: one row per point, in original units and label names."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from bnn_runner.base import Posterior, Predictive
from bnn_runner.errors import UserError
from bnn_runner.evaluation.evaluate import evaluate_split
from bnn_runner.evaluation.predictive import log_weights, mixture_mean, total_entropy, variance_parts
from bnn_runner.scoring import Evaluation
from bnn_runner.tasks import Split, Task

if TYPE_CHECKING:
    import pandas as pd

CHUNK_POINTS = 2048  # points whose draws are in memory at once
_BISECTIONS = 60


@dataclass(frozen=True)
class Predictor:
    """A posterior with its task and the settings with which its run evaluated it.

    Attributes:
        task: The task to which the posterior was fitted.
        posterior: The posterior.
        predictive: Predictions from draws or in closed form.
        num_draws: Number of draws S.
        seed: Seed of the draws.
        batch_size: Points per batch.
        temperature: Temperature of the logits; None without calibration.
    """

    task: Task
    posterior: Posterior
    predictive: Predictive
    num_draws: int
    seed: int
    batch_size: int
    temperature: float | None = None

    def table(self, points: Split, level: float = 0.95) -> pd.DataFrame:
        """Returns a table with one row per point.

        Columns for each regression target, in its own units: `mean`, `sd`, its parts `aleatoric_sd` (noise) and
        `epistemic_sd` (sd² = aleatoric² + epistemic²), and `lower_<percent>`, `upper_<percent>` of the central
        interval of the predictive distribution. Columns for classification: `predicted` (label), `p_<label>`,
        `total_entropy` and, for predictions from draws, its parts `aleatoric_entropy` (mean entropy of a draw) and
        `mutual_information`, in nats.

        Args:
            points: New points, prepared for the network.
            level: Probability of the central interval.

        Raises:
            UserError: If `level` is not between 0 and 1.
        """
        import pandas as pd

        if not 0 < level < 1:
            raise UserError(f"level must be between 0 and 1, such as 0.95; got {level}.")
        tables = []
        for first in range(0, len(points), CHUNK_POINTS):
            chunk = points.subset(torch.arange(first, min(first + CHUNK_POINTS, len(points))))
            evaluation = evaluate_split(
                self.task,
                self.posterior,
                chunk,
                self.predictive,
                self.num_draws,
                self.seed,
                self.batch_size,
                temperature=self.temperature,
            )
            regression = self.task.spec.kind == "regression"
            columns = self._regression(evaluation, level) if regression else self._classes(evaluation)
            tables.append(pd.DataFrame(columns))
        return pd.concat(tables, ignore_index=True)

    def _regression(self, evaluation: Evaluation, level: float) -> dict[str, list[float]]:
        test = evaluation.test
        assert test.means is not None and test.variances is not None
        weight = log_weights(evaluation)
        aleatoric, epistemic = variance_parts(test, weight)
        mean = mixture_mean(test.means, weight)
        tail = (1 - level) / 2
        sds = test.variances.double().sqrt()
        bounds = [mixture_quantile(test.means.double(), sds, weight, p) for p in (tail, 1 - tail)]
        percent = f"{100 * level:g}"
        parts = {
            "mean": mean,
            "sd": (aleatoric + epistemic).sqrt(),
            "aleatoric_sd": aleatoric.sqrt(),
            "epistemic_sd": epistemic.clamp(min=0).sqrt(),
            f"lower_{percent}": bounds[0],
            f"upper_{percent}": bounds[1],
        }
        names = self._target_names()
        return {
            f"{part}{f'_{name}' if len(names) > 1 else ''}": values[:, k].tolist()
            for k, name in enumerate(names)
            for part, values in parts.items()
        }

    def _target_names(self) -> tuple[str, ...]:
        return self.task.target_names or tuple(str(k) for k in range(self.task.spec.num_outputs))

    def _classes(self, evaluation: Evaluation) -> dict[str, list[float] | list[str]]:
        test = evaluation.test
        assert test.mean_probs is not None
        labels = self.task.class_names or tuple(str(k) for k in range(self.task.spec.num_outputs))
        total = total_entropy(test)
        columns: dict[str, list[float] | list[str]] = {"predicted": [labels[k] for k in test.mean_probs.argmax(-1)]}
        columns |= {f"p_{label}": test.mean_probs[:, k].tolist() for k, label in enumerate(labels)}
        columns["total_entropy"] = total.tolist()
        if test.mean_entropy is not None:
            columns["aleatoric_entropy"] = test.mean_entropy.tolist()
            columns["mutual_information"] = (total - test.mean_entropy).clamp(min=0).tolist()
        return columns


def mixture_quantile(means: Tensor, sds: Tensor, log_weight: Tensor, p: float) -> Tensor:
    """Returns the p-quantile [N, K] of Σ_s w_s N(means[s], sds[s]²), by bisection.

    Args:
        means: [S, N, K].
        sds: Standard deviations; broadcast against `means`.
        log_weight: log w_s, [S].
        p: Between 0 and 1.

    >>> means, sds = torch.zeros(1, 1, 1).double(), torch.ones(1, 1, 1).double()
    >>> round(float(mixture_quantile(means, sds, torch.zeros(1).double(), 0.975)), 4)
    1.96
    """
    # The quantile of the mixture is between the smallest and the largest quantile of its components.
    ends = means + sds * math.sqrt(2) * torch.erfinv(torch.tensor(2 * p - 1, dtype=means.dtype))
    low, high = ends.amin(0), ends.amax(0)
    weight = log_weight.exp().reshape(-1, 1, 1).to(means.dtype)
    if len(means) == 1:
        return ends[0]
    for _ in range(_BISECTIONS):
        middle = (low + high) / 2
        below = (weight * torch.special.ndtr((middle - means) / sds)).sum(0)
        low, high = torch.where(below < p, middle, low), torch.where(below < p, high, middle)
    return (low + high) / 2
