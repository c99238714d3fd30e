"""`hyper=auto`: another rule, by the kind of the task."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from bnn_runner.base import Choice, PrecisionProblem
from bnn_runner.hyper.evidence import Evidence
from bnn_runner.tasks import TaskSpec


@dataclass(frozen=True)
class Auto:
    """The rule for regression or the rule for classes; an experiment replaces it by that rule before anything runs.

    On classes the evidence makes predictions that are often worse than the network's own; outputs/results/
    laplace_defaults.md has the comparison from which the defaults were chosen.

    Attributes:
        regression: choice of the group `hyper` for regression.
        classes: choice for classes.
        unvalidated: choice for classes where there is no validation part.
    """

    regression: str = "evidence"
    classes: str = "grid"
    unvalidated: str = "evidence"
    needs_validation: ClassVar[bool] = False

    def choice(self, spec: TaskSpec) -> tuple[str, str]:
        """The choice for a task, and a note ("" if there is nothing to say)."""
        if spec.kind == "regression":
            return self.regression, ""
        if spec.val_fraction > 0 or self.classes == self.unvalidated:
            return self.classes, ""
        return self.unvalidated, (
            f"data.val_fraction=0 leaves no validation data for hyper={self.classes}, so hyper={self.unvalidated} is "
            "used. On classes, precisions selected without validation data often make predictions worse than the "
            "network's own; data.val_fraction=0.1 avoids that"
        )

    def choose(self, problem: PrecisionProblem) -> Choice:
        """By the evidence: without an experiment, the kind of the task is not known."""
        return Evidence().choose(problem)
