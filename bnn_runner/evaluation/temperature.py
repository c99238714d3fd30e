"""Temperature scaling of a classifier's posterior: one temperature for the logits of every draw.

T maximises the marginal log-likelihood of the validation part, the mean over n of
log Σ_s w_s softmax(f_s(x_n)/T)_{y_n} (Guo et al. 2017, with each draw's logits in place of one network's).
The same T is used for marginal and joint scores. A closed form (probit, bridge) has no draws: there T
divides the logarithms of its class probabilities, p ∝ p^(1/T). (Scaling the moments of f would not do:
as T goes to 0 the probit logit tends to m/√(π v/8), so that it could never become sharper.)
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch

from bnn_runner.base import ClosedForm, Posterior, Predictive
from bnn_runner.errors import RunFailed, raise_all
from bnn_runner.evaluation.closed_form import closed_form_log_probs
from bnn_runner.rng import generator
from bnn_runner.tasks import Task, TaskSpec

LOWEST, HIGHEST = 0.05, 100.0
_COARSE, _PRECISION = 24, 1e-4  # of log T
_NUMBERS = 20_000_000  # logits kept at once


@dataclass(frozen=True)
class Calibration:
    """The temperature, and the mean log-likelihood of the `points` validation points before and after it (nats)."""

    temperature: float
    points: int
    before: float
    after: float

    def note(self) -> str:
        """The result in words."""
        text = (
            f"logits are divided by the temperature {self.temperature:.4g}, fitted on {self.points} validation points "
            f"(log-likelihood {self.before:.4g} -> {self.after:.4g} nats per point)"
        )
        edge = min(self.temperature / LOWEST, HIGHEST / self.temperature) < 1.01
        return text + ("; it is at the edge of the search range, so there is no optimum inside" if edge else "")


def calibration_problems(spec: TaskSpec) -> list[str]:
    """Why a task does not support temperature scaling (empty when it does)."""
    if spec.kind != "classification":
        return [
            f"eval.calibrate=temperature requires classes; data={spec.name} is a regression, whose noise is set by "
            "likelihood.noise. Use eval.calibrate=none."
        ]
    if spec.val_fraction == 0:
        return [
            "eval.calibrate=temperature requires validation data; data.val_fraction=0 leaves none. "
            "Set data.val_fraction=0.1, or use eval.calibrate=none."
        ]
    return []


def fit_temperature(
    task: Task, posterior: Posterior, predictive: Predictive, num_draws: int, seed: int, batch_size: int
) -> Calibration:
    """The best temperature for this predictive and for the draws that evaluation will use.

    Args:
        task: its validation part is what T is fitted on.
        posterior: what is calibrated.
        predictive: as in `evaluate`.
        num_draws: S.
        seed: of the draws.
        batch_size: points per batch.

    Raises:
        UserError: the task does not support temperature scaling.
        RunFailed: logits are not finite.
    """
    raise_all(calibration_problems(task.spec))
    with torch.no_grad():
        if predictive == "draws":
            score, points = _draws_score(task, posterior, num_draws, seed, batch_size)
        else:
            assert isinstance(posterior, ClosedForm)
            score, points = _moments_score(task, posterior, predictive, batch_size)
        before = score(1.0)
        if not math.isfinite(before):
            raise RunFailed(
                f"eval.calibrate=temperature requires a finite validation log-likelihood; it is {before}. Use "
                "eval.calibrate=none, or train with a lower schedule.lr."
            )
        temperature = math.exp(_maximise(lambda log_t: score(math.exp(log_t)), math.log(LOWEST), math.log(HIGHEST)))
        return Calibration(temperature, points, before, score(temperature))


def _draws_score(
    task: Task, posterior: Posterior, num_draws: int, seed: int, batch_size: int
) -> tuple[Callable[[float], float], int]:
    draws = posterior.draws(num_draws, seed)
    split = task.val
    fits = max(1, _NUMBERS // (len(draws) * task.spec.num_outputs))
    if len(split) > fits:
        chosen = torch.randperm(len(split), generator=generator(seed, "calibration"))[:fits]
        split = split.subset(chosen.sort().values)
    logits = torch.cat([draws(x).cpu().double() for x, _ in split.batches(batch_size)], dim=1)  # [S, N, K]
    assert split.targets is not None
    log_weights = torch.log_softmax(draws.log_weights.detach().cpu().double(), 0).unsqueeze(-1)
    place = split.targets.cpu().expand(logits.shape[:2]).unsqueeze(-1)

    def score(temperature: float) -> float:
        log_probs = torch.log_softmax(logits / temperature, -1).gather(-1, place).squeeze(-1)
        return float((log_probs + log_weights).logsumexp(0).mean())

    return score, len(split)


def _moments_score(
    task: Task, posterior: ClosedForm, predictive: Predictive, batch_size: int
) -> tuple[Callable[[float], float], int]:
    log_probs = torch.cat(
        [
            closed_form_log_probs(posterior.moments(x), predictive, None)[0].cpu()
            for x, _ in task.val.batches(batch_size)
        ]
    )
    assert task.val.targets is not None
    place = task.val.targets.cpu().unsqueeze(-1)

    def score(temperature: float) -> float:
        return float(torch.log_softmax(log_probs / temperature, -1).gather(-1, place).mean())

    return score, len(task.val)


def _maximise(score: Callable[[float], float], low: float, high: float) -> float:
    """The best point of a coarse grid, refined by golden-section search between its neighbours."""
    step = (high - low) / _COARSE
    grid = [low + i * step for i in range(_COARSE + 1)]
    best = max(grid, key=score)
    a, b = max(low, best - step), min(high, best + step)
    golden = (math.sqrt(5) - 1) / 2
    c, d = b - golden * (b - a), a + golden * (b - a)
    at_c, at_d = score(c), score(d)
    while b - a > _PRECISION:
        if at_c >= at_d:
            b, d, at_d = d, c, at_c
            c = b - golden * (b - a)
            at_c = score(c)
        else:
            a, c, at_c = c, d, at_d
            d = a + golden * (b - a)
            at_d = score(d)
    return (a + b) / 2
