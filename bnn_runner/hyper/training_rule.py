"""The contract of hyperparameter rules that act during training, and the state that they keep.

Such a rule changes the training prior between epochs, so it belongs to the trained network: its
fields are part of the network's cache key, and every method that is fitted to the network shares it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from torch import Tensor

if TYPE_CHECKING:
    from bnn_runner.base import Method, Network
    from bnn_runner.tasks import Task
    from bnn_runner.training.schedules import Schedule


@dataclass
class TuningState:
    """What a rule changes during one training.

    Attributes:
        precisions: of the parameter tensors, by name.
        trace: one row per update.
        moments: the rule's own numbers (those of an optimiser in log λ).
        converged: ends the training.
        best: the weights to end with, where they are not the last ones: a mapping of parameters, buffers, log_noise,
            precisions and evidence.
    """

    precisions: dict[str, float]
    trace: list[dict[str, Any]] = field(default_factory=list)
    moments: list[Tensor] = field(default_factory=list)
    converged: bool = False
    best: dict[str, Any] = field(default_factory=dict)

    def payload(self) -> dict[str, Any]:
        """Everything as plain tensors and numbers, for `restore`."""
        return dict(vars(self))

    def restore(self, saved: Mapping[str, Any]) -> None:
        for name in vars(self):
            setattr(self, name, saved[name])


@runtime_checkable
class TrainingRule(Protocol):
    """A hyperparameter rule that changes the training prior during training; a frozen dataclass like every rule.

    Epochs are counted from 1, and an epoch that is named has ended. `seed` is that of the lane (one network among
    those that are trained at once).
    """

    def epochs(self, schedule: Schedule) -> int:
        """The most epochs that are trained."""
        ...

    def lr_at(self, schedule: Schedule, step: int, per_epoch: int) -> float:
        """The learning rate of update number `step` (from 0)."""
        ...

    def due(self, schedule: Schedule, epoch: int) -> bool:
        """Whether the precisions are updated after `epoch`."""
        ...

    def restarts(self, schedule: Schedule, epoch: int) -> bool:
        """Whether the optimiser's state is reset after `epoch`."""
        ...

    def update(self, network: Network, task: Task, state: TuningState, epoch: int, seed: int) -> None:
        """Choose precisions for the network at its current weights: changes `state`, and adds a row to its trace."""
        ...

    def outcome(self, trace: Sequence[Mapping[str, Any]]) -> tuple[str, tuple[str, ...]]:
        """How a finished training ended (the row's `hyper_status`), and notes for a reader, from its trace."""
        ...


def misfits(rule: TrainingRule, choice: str, method: Method, name: str) -> list[str]:
    """Why a method does not support the rule (empty when it does).

    Args:
        rule: a rule that acts during training.
        choice: its name, as typed after hyper=.
        method: the method.
        name: its name, as typed after method=.
    """
    problems = []
    if any(spec.trained and spec.noise_transform is not None for spec in method.needs()):
        problems.append(
            f"hyper={choice} does not support method={name}: it takes the evidence of the network during training, and "
            "a network with noise layers has none. Use hyper=fixed, or another method."
        )
    if getattr(method, "ties_tensors", False) and getattr(rule, "family", "isotropic") != "isotropic":
        problems.append(
            f"hyper={choice} with hyper.family={getattr(rule, 'family', '')} does not support method={name}: it gives "
            "each parameter tensor its own precision, and this method has one block for the weight and the bias of a "
            "layer. Use hyper.family=isotropic, or method.structure=kfac with method.bias=separate."
        )
    return problems


def training_facts(rule: TrainingRule, networks: Sequence[Network]) -> tuple[dict[str, Any], list[str]]:
    """Facts for the row of a cell, and notes, from the traces of its networks; empty where none has one."""
    traces = [n.tuning for n in networks if n.tuning]
    if not traces:
        return {}, []
    ends = [rule.outcome(trace) for trace in traces]
    facts = {
        "hyper_status": ", ".join(dict.fromkeys(status for status, _ in ends)),
        "hyper_updates": max(len(trace) for trace in traces),
        "training_evidence_nats": [max(row["evidence_nats"] for row in trace) for trace in traces],
    }
    return facts, list(dict.fromkeys(note for _, notes in ends for note in notes))
