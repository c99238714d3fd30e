"""From a posterior to an `Evaluation`: everything that metrics need, once, on the CPU.

The outer loop is over chunks of draws, the inner one over data, so that few weight vectors exist at once and
whatever a draw must prepare (batchnorm statistics, say) is prepared once. The same draws are evaluated on test, val
and every out-of-distribution set. All numbers are in original target units and nats.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import TypeVar

import torch
from torch import Tensor

from bnn_runner.base import ClosedForm, Draws, Likelihood, Posterior, Predictive, centre_of
from bnn_runner.errors import RunFailed, raise_all
from bnn_runner.evaluation.accumulators import Accumulator, ClassAccumulator, RegressionAccumulator
from bnn_runner.evaluation.closed_form import closed_form_log_probs, widest_on_device
from bnn_runner.evaluation.exact_gaussian import gaussian_joint, regression_piece, with_exact_logliks
from bnn_runner.rng import generator
from bnn_runner.runtime.console import Progress
from bnn_runner.runtime.memory import memory_limit, out_of_memory
from bnn_runner.scoring import Evaluation, SplitEvaluation
from bnn_runner.tasks import Split, Task

DRAW_FLOATS = 64_000_000  # numbers held by the draws of one chunk
OUTPUT_FLOATS = 8_000_000  # numbers in one [S, B, K] output

_MaybeTensor = TypeVar("_MaybeTensor", Tensor, Tensor | None)


def evaluate(
    task: Task,
    posterior: Posterior,
    predictive: Predictive,
    num_draws: int,
    seed: int,
    batch_size: int,
    max_ood: int,
    progress: Progress = lambda stage, done, total: None,
    temperature: float | None = None,
    max_shift: int = 0,
) -> Evaluation:
    """Score `posterior` on test, val and every out-of-distribution set of `task`.

    A regression posterior with closed-form moments also gets its exact Gaussian joint for up to JOINT_POINTS test
    points. Log-likelihoods are float64 (float32 above 20 million numbers, with a note).

    Args:
        task: its splits are scored, in its units.
        posterior: what is scored.
        predictive: "draws" (S functions; joint scores exist), "closed_form" (regression: the exact Gaussian;
            classes: probit) or "bridge" (Laplace bridge, classes).
        num_draws: S.
        seed: of the draws and of the subsets.
        batch_size: points per batch.
        max_ood: points of each out-of-distribution set; a random subset that depends on the seed and its name only.
        progress: called as progress(stage, done, total).
        temperature: divides the logits of classes (see `temperature`).
        max_shift: points of the shifted test set, the same at every level.

    Raises:
        UserError: invalid settings, or a predictive that the posterior does not support.
        RunFailed: draws are not frozen functions.
    """
    raise_all(_problems(task, posterior, predictive, num_draws, batch_size))
    splits, notes = _splits(task, max_ood, max_shift, seed)
    scored = _score(task, posterior, splits, predictive, num_draws, seed, batch_size, progress, temperature)
    with torch.no_grad():
        joint, joint_notes = gaussian_joint(task, posterior, batch_size)
        scored_splits = dict(scored.splits)
        if predictive == "draws":
            scored_splits = with_exact_logliks(task, posterior, splits, scored_splits, joint, batch_size)
        alone = posterior.finite and len(scored.log_weights) == 1  # such a posterior is its own centre
        centre = None if alone else _centre(task, posterior, splits, batch_size, temperature)
    return replace(
        scored,
        splits=scored_splits,
        gaussian_joint=joint,
        unavailable={f"ood/{name}": reason for name, reason in sorted(task.unavailable.items())},
        centre=centre,
        notes=(*notes, *scored.notes, *joint_notes),
    )


def evaluate_split(
    task: Task,
    posterior: Posterior,
    split: Split,
    predictive: Predictive,
    num_draws: int,
    seed: int,
    batch_size: int,
    progress: Progress = lambda stage, done, total: None,
    temperature: float | None = None,
) -> Evaluation:
    """Score `posterior` on one split, which need not belong to `task`: new points, a grid, or a test set by itself.

    Args:
        task: gives the kind, the number of outputs and the units of the targets.
        posterior: what is scored.
        split: with or without targets.
        predictive: as in `evaluate`, like the other arguments.
        num_draws: S.
        seed: of the draws.
        batch_size: points per batch.
        progress: called as progress(stage, done, total).
        temperature: divides the logits of classes.

    Returns:
        An evaluation whose only split is `split`, under the name "test"; it has no Gaussian joint.
    """
    raise_all(_problems(task, posterior, predictive, num_draws, batch_size))
    named = {"test": split}
    return _score(task, posterior, named, predictive, num_draws, seed, batch_size, progress, temperature)


@torch.no_grad()
def _score(
    task: Task,
    posterior: Posterior,
    splits: Mapping[str, Split],
    predictive: Predictive,
    num_draws: int,
    seed: int,
    batch_size: int,
    progress: Progress,
    temperature: float | None,
) -> Evaluation:
    """The scored splits, without what only a task's own test set has."""
    if predictive == "draws":
        scored = _score_draws(task, posterior.draws(num_draws, seed), splits, batch_size, progress, temperature)
    else:
        assert isinstance(posterior, ClosedForm)
        scored = _score_moments(task, posterior, predictive, splits, batch_size, progress, temperature)
    return Evaluation(
        kind=task.spec.kind,
        predictive="probit" if predictive == "closed_form" and task.spec.kind == "classification" else predictive,
        finite=posterior.finite,
        has_joint=predictive == "draws",
        log_weights=scored.log_weights,
        splits=scored.splits,
        temperature=temperature,
        notes=scored.notes,
    )


@dataclass(frozen=True)
class _CentreDraw:
    """The centre of a posterior as its only draw."""

    centre: Callable[[Tensor], Tensor]
    likelihood: Likelihood
    floats_per_draw: int = 0

    @property
    def log_weights(self) -> Tensor:
        return torch.zeros(1)

    def __len__(self) -> int:
        return 1

    def __getitem__(self, part: slice) -> _CentreDraw:
        return self

    def __call__(self, x: Tensor) -> Tensor:
        return self.centre(x).unsqueeze(0)


def _centre(
    task: Task, posterior: Posterior, splits: Mapping[str, Split], batch_size: int, temperature: float | None
) -> Evaluation | None:
    """The centre's predictions for the test and validation parts; None for a posterior without a centre."""
    centre = centre_of(posterior)
    if centre is None:
        return None
    parts = {name: splits[name] for name in ("test", "val") if name in splits}
    draw = _CentreDraw(centre, posterior.likelihood)
    scored = _score_draws(task, draw, parts, batch_size, lambda stage, done, total: None, temperature)
    return Evaluation(task.spec.kind, "draws", True, True, scored.log_weights, scored.splits, temperature=temperature)


@dataclass(frozen=True)
class _Scored:
    log_weights: Tensor
    splits: Mapping[str, SplitEvaluation]
    notes: tuple[str, ...]


def _problems(task: Task, posterior: Posterior, predictive: str, num_draws: int, batch_size: int) -> list[str]:
    problems = []
    if num_draws < 1:
        problems.append(f"eval.num_draws must be at least 1; got {num_draws}.")
    if batch_size < 1:
        problems.append(f"eval.batch_size must be at least 1; got {batch_size}.")
    if predictive == "bridge" and task.spec.kind != "classification":
        problems.append(
            f"method.predict=bridge requires classes; data={task.spec.name} is a regression. Use "
            "method.predict=closed_form or method.predict=draws."
        )
    if predictive not in ("draws", "closed_form", "bridge"):
        problems.append(f"The predictive must be draws, closed_form or bridge; got {predictive}.")
    elif predictive != "draws" and not isinstance(posterior, ClosedForm):
        problems.append(
            f"method.predict={predictive} requires output moments in closed form, which this posterior does not have. "
            "Use method.predict=draws."
        )
    return problems


def _splits(task: Task, max_ood: int, max_shift: int, seed: int) -> tuple[dict[str, Split], list[str]]:
    """The splits to evaluate, by name, and notes on what is left out."""
    named = {"test": task.test} | ({"val": task.val} if len(task.val) else {})
    notes = [f"ood/{name} is not available: {reason}" for name, reason in sorted(task.unavailable.items())]
    for name, split in task.ood.items():
        if len(split) > max_ood:
            chosen = torch.randperm(len(split), generator=generator(seed, "eval", "ood", name))[:max_ood]
            notes.append(f"ood/{name}: {max_ood} of {len(split)} points, chosen by the seed")
            split = split.subset(chosen.sort().values)
        if len(split):
            named[f"ood/{name}"] = split
    if max_shift and task.shifted:
        # The same points at every level, so that levels differ by the shift alone.
        order = torch.randperm(len(task.test), generator=generator(seed, "eval", "shift"))
        chosen = order[:max_shift].sort().values
        notes.append(f"shift/*: {len(chosen)} of {len(order)} test points, the same at every level")
        named |= {f"shift/{name}": split.subset(chosen) for name, split in task.shifted.items()}
    return named, notes


# -------------------------------------------------------------------------------------- draws


def _score_draws(
    task: Task,
    draws: Draws,
    splits: Mapping[str, Split],
    batch_size: int,
    progress: Progress,
    temperature: float | None,
) -> _Scored:
    size = len(draws)
    log_weights = draws.log_weights.detach().cpu().double()
    weights = torch.softmax(log_weights, 0)
    check_frozen(draws, next(iter(splits.values())))
    accumulators = {name: _accumulator(task, split, size, weights) for name, split in splits.items()}
    held, shown = min(DRAW_FLOATS, memory_limit().floats(0.25)), min(OUTPUT_FLOATS, memory_limit().floats(0.05))
    chunk = max(1, min(size, int(held // max(draws.floats_per_draw, 1))))
    chunk = max(1, min(chunk, int(shown // (batch_size * task.spec.num_outputs))))
    per_chunk = sum(-(-len(split) // batch_size) for split in splits.values())
    done, total = 0, per_chunk * -(-size // chunk)
    for first in range(0, size, chunk):
        part = draws[first : first + chunk]  # one slice for all data: it may prepare something costly once
        for name, split in splits.items():
            start = 0
            for x, y in split.batches(batch_size):
                outputs = _wide(outputs_within_memory(part, x))
                if temperature is not None:
                    outputs = outputs / temperature
                accumulators[name].add(first, start, outputs, _wide(y), part.likelihood)
                start += len(x)
                done += 1
                progress("evaluation", done, total)
    notes = [note for accumulator in accumulators.values() for note in accumulator.notes()]
    return _Scored(log_weights, {name: a.result() for name, a in accumulators.items()}, tuple(dict.fromkeys(notes)))


def _accumulator(task: Task, split: Split, num_draws: int, weights: Tensor) -> Accumulator:
    if task.spec.kind == "classification":
        return ClassAccumulator(split, num_draws, weights)
    return RegressionAccumulator(split, num_draws, task.target_mean, task.target_scale)


def check_frozen(draws: Draws, split: Split) -> None:
    """Raise `RunFailed` unless the first draws are functions: a point's output must not depend on the call.

    A joint likelihood over fresh randomness per input is silently wrong (its marginal is not), so
    a few points are evaluated twice: in the same batch, and among other points. The tolerance allows
    for matrix products of reduced precision, which change slightly with the batch's shape.
    """
    x, _ = split.gather(torch.arange(min(4, len(split)), device=split.inputs.device))
    probe = draws[0:2]
    whole, again, tail = probe(x), probe(x), probe(x[len(x) // 2 :])
    scale = 1.0 + float(whole.abs().nan_to_num(0, 0, 0).max())
    for name, other, reference, tolerance in (
        ("when the same points are evaluated again", again, whole, 1e-4),
        ("with the other points of the batch", tail, whole[:, len(x) // 2 :], 3e-3),
    ):
        gap = float((other - reference).abs().nan_to_num(0, 0, 0).max())
        if gap > tolerance * scale:
            raise RunFailed(
                f"A posterior draw must be one fixed function; its output changes by {gap:.3g} {name}. Joint scores "
                "would be wrong without any sign of it. Fix the method: all randomness of draw s must come from "
                "(seed, s), and batchnorm must be in evaluation mode."
            )


def outputs_within_memory(draws: Draws, x: Tensor) -> Tensor:
    """`draws(x)` [S, B, K]; in halves where memory runs out (of the draws first, then of the points)."""
    try:
        return draws(x)
    except Exception as error:
        if not out_of_memory(error) or (len(draws) == 1 and len(x) == 1):
            raise
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    if len(draws) > 1:
        half = len(draws) // 2
        return torch.cat([outputs_within_memory(draws[:half], x), outputs_within_memory(draws[half:], x)])
    half = len(x) // 2
    return torch.cat([outputs_within_memory(draws, x[:half]), outputs_within_memory(draws, x[half:])], dim=1)


def _wide(values: _MaybeTensor) -> _MaybeTensor:
    """Floating-point numbers in float64 where the device has it, else float32: never half precision."""
    if values is None or not values.is_floating_point():
        return values
    return widest_on_device(values)


# -------------------------------------------------------------------------------- closed forms


def _score_moments(
    task: Task,
    posterior: ClosedForm,
    predictive: Predictive,
    splits: Mapping[str, Split],
    batch_size: int,
    progress: Progress,
    temperature: float | None,
) -> _Scored:
    """One Gaussian over outputs per point, so S = 1 and nothing joint."""
    done, total = 0, sum(-(-len(split) // batch_size) for split in splits.values())
    repaired = 0
    results = {}
    for name, split in splits.items():
        pieces: list[SplitEvaluation] = []
        for x, y in split.batches(batch_size):
            if task.spec.kind == "classification":
                piece, count = _class_piece(posterior, predictive, x, y, temperature)
            else:
                piece, count = regression_piece(task, posterior, x, y)
            pieces.append(piece)
            repaired += count
            done += 1
            progress("evaluation", done, total)
        results[name] = _concatenate(pieces, split)
    notes = (f"{repaired} slightly negative predictive variances were set to zero",) if repaired else ()
    return _Scored(torch.zeros(1, dtype=torch.float64), results, notes)


def _class_piece(
    posterior: ClosedForm, predictive: Predictive, x: Tensor, y: Tensor | None, temperature: float | None
) -> tuple[SplitEvaluation, int]:
    log_probs, repaired = closed_form_log_probs(posterior.moments(x), predictive, temperature)
    loglik = None if y is None else log_probs.gather(-1, y.unsqueeze(-1)).squeeze(-1).unsqueeze(0)
    return SplitEvaluation(ids=torch.empty(0), loglik=loglik, targets=y, mean_probs=log_probs.exp()), repaired


def _concatenate(pieces: list[SplitEvaluation], split: Split) -> SplitEvaluation:
    """Batches of one split put together, on the CPU."""

    def joined(name: str, dim: int) -> Tensor | None:
        tensors = [getattr(piece, name) for piece in pieces]
        if any(t is None for t in tensors):
            return None
        whole = torch.cat([t.cpu() for t in tensors], dim=dim)
        return whole.double() if whole.is_floating_point() else whole

    axes = {"loglik": 1, "targets": 0, "mean_probs": 0, "means": 1, "variances": 1, "epistemic": 0}
    return SplitEvaluation(ids=split.ids.cpu(), **{name: joined(name, dim) for name, dim in axes.items()})
