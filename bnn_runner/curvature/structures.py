"""The curvature of a task in the structure asked for: which passes are made, and how each tensor is treated."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Literal

from bnn_runner.curvature.block_fits import Sharing, fit_diagonal, fit_ekfac, fit_kfac, fit_layers
from bnn_runner.curvature.blocks import BlockCurvature
from bnn_runner.curvature.full import FullCurvature, fit_full
from bnn_runner.curvature.groups import Group
from bnn_runner.curvature.jacobians import BatchJacobians, Jacobians
from bnn_runner.curvature.low_rank import LowRankCurvature, fit_low_rank
from bnn_runner.curvature.output_curvature import OutputCurvature
from bnn_runner.curvature.psd import Repairs
from bnn_runner.runtime.memory import halving
from bnn_runner.tasks import Task

Structure = Literal["full", "block", "kfac", "ekfac", "diag", "low_rank"]


@dataclass(frozen=True)
class Fit:
    """A fit over the clean training set in order, no point dropped; `rank` is that of a low-rank one."""

    task: Task
    jacobians: Jacobians
    output_curvature: OutputCurvature
    sharing: Sharing
    joint_bias: bool
    repairs: Repairs
    progress: Callable[[str, int, int], None]
    rank: int = 0

    def __call__(self, structure: Structure) -> BlockCurvature | FullCurvature | LowRankCurvature:
        """Where memory runs out, the fit starts again with half as many points at once; how often is counted."""
        return halving(lambda: self._fit(structure), lambda: self.jacobians.halve(self.repairs))

    def _fit(self, structure: Structure) -> BlockCurvature | FullCurvature | LowRankCurvature:
        if structure in ("full", "low_rank"):
            rows = len(self.task.train) * self.output_curvature.columns(self.task, self.jacobians.network)
            if structure == "low_rank":
                return fit_low_rank(self.jacobians, self.batches, rows, self.rank, self.repairs)
            return fit_full(self.jacobians, self.batches(), rows, self.repairs)
        if structure == "block":
            return fit_layers(self.jacobians, self.batches, self.repairs)
        batches = partial(self.batches, use="factors")
        if structure == "diag":
            return fit_diagonal(self.jacobians, batches)
        if structure == "kfac":
            return fit_kfac(self.jacobians, batches, self.repairs, self.sharing, self.joint_bias)
        return fit_ekfac(self.jacobians, batches, self.repairs, self.sharing, self.joint_bias)

    def batches(self, use: Literal["any", "factors"] = "any") -> Iterator[BatchJacobians]:
        """One pass: Jacobians of Rᵀ f, batch after batch, as many points at once as their use (see there) allows."""
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


def rule_of(structure: Structure, jacobians: Jacobians, group: Group) -> str:
    """How the tensors of a group are treated, in words."""
    if structure == "full":
        return "full curvature"
    if structure == "low_rank":
        return "leading eigenpairs of the full curvature"
    if structure == "diag":
        return "diagonal"
    if structure == "block":
        return "own block (exact, by layer)"
    if group.homogeneous:
        return "Kronecker factors, weight and bias together"
    kinds = {
        "matrix": "Kronecker factors",
        "bias": "own block (output factor)",
        "norm": "own block (exact)",
        "general": "own diagonal (exact)",
    }
    return kinds[jacobians.rule(group.name)]


BY_STRUCTURE: dict[str, tuple[str, ...]] = {
    "kfac": ("martens2015", "botev2017", "grosse2016"),
    "ekfac": ("martens2015", "botev2017", "grosse2016", "george2018"),
    "low_rank": ("halko2011", "gittens2016"),
}
"""BibTeX keys."""
