"""A task from a table of numbers: inputs (and regression targets) scaled by the training part alone."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from bnn_runner.data.splits import Parts, fingerprint
from bnn_runner.errors import UserError
from bnn_runner.tasks import Split, Task, TaskSpec

# A column is constant if its range is below this share of its size: such variation is rounding.
CONSTANT_RANGE = 1e-10
LARGE = 1e100
FAR = 1e15
"""Scaled values end there, so that their squares are float32 numbers."""


@dataclass(frozen=True)
class Scaling:
    """original = mean + scale * scaled; both [D], float64. `constant` lists the constant columns."""

    mean: Tensor
    scale: Tensor
    constant: tuple[int, ...] = ()

    def apply(self, values: Tensor) -> Tensor:
        """Scaled values [..., D] in float32, at most `FAR` (the algebra is float64, so large offsets lose nothing)."""
        scaled = (values - self.mean.to(values.device)) / self.scale.to(values.device)
        return scaled.clamp(-FAR, FAR).float()

    def __call__(self, values: Tensor) -> Tensor:
        """As `apply`: a scaling encodes new points."""
        return self.apply(values)


def standardise(values: Tensor) -> Scaling:
    """Mean and standard deviation (over N, population form) of `values` [N, D]; scale 1 for a constant column.

    A column counts as constant by its range relative to its largest size, since rounding can make the standard
    deviation of equal numbers differ from zero.
    """
    values = values.double()
    extent = values.amax(0) - values.amin(0)
    constant = extent <= CONSTANT_RANGE * values.abs().amax(0)
    mean, deviation = values.mean(0), values.std(0, correction=0)
    if float(values.abs().max()) > LARGE:  # squares would overflow
        unit = values.abs().amax(0).clamp(min=1.0)
        mean, deviation = (values / unit).mean(0) * unit, (values / unit).std(0, correction=0) * unit
    scale = torch.where(constant, torch.ones_like(extent), deviation)
    return Scaling(mean, scale, tuple(constant.nonzero().squeeze(1).tolist()))


def _identity(count: int) -> Scaling:
    return Scaling(torch.zeros(count), torch.ones(count))


def table_task(
    spec: TaskSpec,
    inputs: Tensor,
    targets: Tensor,
    parts: Parts,
    *,
    scaling: Scaling | None = None,
    scale_targets: bool = True,
    ood: Mapping[str, Tensor] | None = None,
    truth: Callable[[Tensor], Tensor] | None = None,
    true_noise: Callable[[Tensor], Tensor] | None = None,
    class_names: tuple[str, ...] = (),
    notes: tuple[str, ...] = (),
    feature_names: tuple[str, ...] = (),
    target_names: tuple[str, ...] = (),
    input_names: tuple[str, ...] = (),
    known_constant: tuple[str, ...] = (),
) -> Task:
    """A task whose rows are `inputs` [N, D] with `targets` [N, K] (regression) or [N] (classes), original units.

    Args:
        spec: of the task.
        inputs: [N, D].
        targets: [N, K], or class labels [N].
        parts: rows of train, val and test.
        scaling: of the inputs; without it they are standardised on the training part.
        scale_targets: standardise regression targets on the training part; false trains on them as they are.
        ood: further inputs [M, D] without targets, by name.
        truth: noise-free outputs of inputs in original units.
        true_noise: standard deviation of the noise, likewise.
        class_names: of the K classes.
        notes: for the row of a run.
        feature_names: of the columns of new points.
        target_names: of regression targets.
        input_names: of the D inputs, for notes, if they are not the `feature_names`.
        known_constant: features that `notes` lists as constant already.

    Raises:
        UserError: if the training targets are constant.
    """
    if scaling is None:
        scaling = standardise(inputs[parts.train])
        names = input_names or feature_names or tuple(f"{d} (counted from 0)" for d in range(inputs.shape[1]))
        constant = [names[column] for column in scaling.constant]
        known = [name for name in constant if any(name == k or name.startswith(f"{k}=") for k in known_constant)]
        notes += _constant_note([name for name in constant if name not in known], spec.name)
    if spec.kind == "regression":
        target_scaling = standardise(targets[parts.train])
        if target_scaling.constant:
            which = f" {target_names[target_scaling.constant[0]]}" if target_names else ""
            raise UserError(
                f"The target{which} of {spec.name} must vary; got the same value in all {len(parts.train)} training "
                "points. Raise data.train_size, or use another seed or data set."
            )
        if not scale_targets:
            target_scaling = _identity(spec.num_outputs)
        scaled_targets = target_scaling.apply(targets)
    else:
        target_scaling = _identity(spec.num_outputs)
        scaled_targets = targets.long()
    scaled = scaling.apply(inputs)

    def part(rows: Tensor) -> Split:
        return Split(scaled[rows], scaled_targets[rows], rows)

    train, val = part(parts.train), part(parts.val)
    largest = torch.finfo(torch.float32).max
    input_mean, input_scale = (t.clamp(-largest, largest).float() for t in (scaling.mean, scaling.scale))
    target_mean, target_scale = target_scaling.mean.float(), target_scaling.scale.float()
    return Task(
        spec=spec,
        train=train,
        val=val,
        test=part(parts.test),
        ood={name: Split(scaling.apply(x), None, torch.arange(len(x))) for name, x in (ood or {}).items()},
        fingerprint=fingerprint(train, val.ids, input_mean, input_scale, target_mean, target_scale),
        target_mean=target_mean,
        target_scale=target_scale,
        input_mean=input_mean,
        input_scale=input_scale,
        truth=truth,
        true_noise=true_noise,
        class_names=class_names,
        notes=notes,
        feature_names=feature_names,
        target_names=target_names,
        encode=scaling,
    )


def _constant_note(names: Sequence[str], data: str) -> tuple[str, ...]:
    """One note on the input columns that are constant in the training part; none without any."""
    if not names:
        return ()
    if len(names) == 1:
        return (
            f"Input column {names[0]} of {data} is constant in the training part: it is shifted to 0 and keeps its "
            "scale.",
        )
    shown = ", ".join(names[:8]) + (f" and {len(names) - 8} more" if len(names) > 8 else "")
    return (
        f"Input columns {shown} of {data} are constant in the training part: they are shifted to 0 and keep their "
        "scale.",
    )
