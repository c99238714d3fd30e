"""Passes over the training set that a curvature is fitted in."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Literal

from bnn_runner.curvature.block_fits import Sharing
from bnn_runner.curvature.jacobians import BatchJacobians, Jacobians
from bnn_runner.curvature.output_curvature import OutputCurvature
from bnn_runner.curvature.psd import Repairs
from bnn_runner.runtime.console import Progress
from bnn_runner.tasks import Task


@dataclass(frozen=True)
class TrainingPasses:
    """What a structure is fitted from: the clean training set in order, no point dropped, and the method's settings.

    `sharing` and `joint_bias` are about Kronecker factors, `rank` about a low-rank curvature; `repairs` counts
    numerical repairs.
    """

    task: Task
    jacobians: Jacobians
    output_curvature: OutputCurvature
    sharing: Sharing = "expand"
    joint_bias: bool = False
    rank: int = 0
    repairs: Repairs = field(default_factory=Repairs)
    progress: Progress = lambda stage, done, total: None

    @property
    def num_rows(self) -> int:
        """M = N·C rows of Rᵀ J."""
        return len(self.task.train) * self.output_curvature.columns(self.task, self.jacobians.network)

    def batches(self, use: Literal["any", "factors"] = "any") -> Iterator[BatchJacobians]:
        """One pass: Jacobians of Rᵀ f, batch after batch.

        Args:
            use: any, or factors where no dense Jacobian of a batch is formed: then more points fit at once.
        """
        curvature, likelihood = self.output_curvature, self.jacobians.network.likelihood
        uniforms = curvature.uniforms(self.task)
        total, done = len(self.task.train), 0
        columns = curvature.columns(self.task, self.jacobians.network)
        for x, y in self.task.train.batches(self.jacobians.batch_size(columns, use=use)):
            self.progress("curvature", done, total)
            assert y is not None
            u = None if uniforms is None else uniforms[done : done + len(x)]
            yield self.jacobians(x, partial(curvature.root, likelihood, y=y, uniforms=u))
            done += len(x)
        self.progress("curvature", total, total)

    def factor_batches(self) -> Iterator[BatchJacobians]:
        """`batches` for fits that form no dense Jacobian of a batch."""
        return self.batches(use="factors")
