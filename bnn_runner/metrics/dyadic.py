"""Dyadic and polyadic joint log-likelihood: many labels over few distinct anchor inputs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar, Literal

import torch
from torch import Tensor

from bnn_runner.errors import UserError
from bnn_runner.metrics.block_scores import block_scores, point_scores
from bnn_runner.metrics.blocks import Blocks, permutations, uniform_counts
from bnn_runner.metrics.checks import positive_integers
from bnn_runner.metrics.scores import not_available
from bnn_runner.rng import generator
from bnn_runner.scoring import Evaluation, Score


@dataclass(frozen=True)
class Dyadic:
    """`dyadic_loglik` per kappa; kappa = 1 is the marginal.

    For kappa >= 2 a block has kappa distinct anchors from a seeded permutation and
    tau = `labels` (kappa - 1) labels. Blocks are the same for all methods. Exact values, estimates from draws and
    their status are as in `Joint`.

    Attributes:
        kappas: numbers of distinct anchors.
        labels: labels per further anchor.
        repeats: permutations that are averaged over.
        variant: uniform: tau anchors drawn uniformly with replacement, each with its own label (Osband et al. 2022,
            "The Neural Testbed"); forced (named `dyadic_forced_loglik`, kappa = 2 only): the first anchor n1
            times, n1 uniform in 1..labels-2 (1..8), the second the other 10 - n1 times (Antoran et al. 2023).
        tolerance: nats per label of bias that are allowed even where the standard error is smaller.
    """

    kappas: Sequence[int]
    labels: int
    repeats: int
    variant: Literal["uniform", "forced"]
    tolerance: float
    cites: ClassVar[tuple[str, ...]] = ("osband2022",)

    def __post_init__(self) -> None:
        positive_integers("dyadic", kappas=self.kappas, labels=self.labels, repeats=self.repeats)
        if self.variant not in ("uniform", "forced"):
            raise UserError(f"metric.dyadic.variant must be uniform or forced; got {self.variant}.")
        if self.variant == "forced" and (self.labels < 3 or any(kappa > 2 for kappa in self.kappas)):
            raise UserError(
                "metric.dyadic.variant=forced requires kappas of at most 2 and at least 3 labels; got "
                f"kappas={list(self.kappas)} and labels={self.labels}. "
                "Set metric.dyadic.kappas=[1,2] and metric.dyadic.labels=10, or metric.dyadic.variant=uniform."
            )

    @property
    def metric(self) -> str:
        return "dyadic_loglik" if self.variant == "uniform" else "dyadic_forced_loglik"

    def __call__(self, evaluation: Evaluation, seed: int) -> list[Score]:
        if evaluation.test.loglik is None:
            return []
        scores: list[Score] = []
        for kappa in self.kappas:
            scores += self._marginal(evaluation) if kappa == 1 else self._blocks(evaluation, seed, kappa)
        return scores

    def _marginal(self, evaluation: Evaluation) -> list[Score]:
        fields = {"tau": 1, "kappa": 1, "unit": "nats per block", "note": "the marginal"}
        return point_scores(self.metric, evaluation, "test", **fields)

    def _blocks(self, evaluation: Evaluation, seed: int, kappa: int) -> list[Score]:
        ids = evaluation.test.ids
        tau, num_blocks = self.labels * (kappa - 1), len(ids) // kappa
        missing = not_available(self.metric, "", tau=tau, kappa=kappa, better="higher", unit="nats per block")
        if num_blocks == 0:
            return [replace(missing, note=f"{kappa} anchors require more than the {len(ids)} test points")]
        blocks = []
        for repeat, order in enumerate(permutations(ids, self.repeats, seed, "dyadic")):
            anchors = order[: num_blocks * kappa].reshape(num_blocks, kappa)
            stream = generator(seed, "eval", "dyadic", self.variant, len(ids), kappa, tau, repeat)
            blocks.append(Blocks(anchors, self._counts(num_blocks, kappa, tau, stream)))
        left = len(ids) - num_blocks * kappa
        note = f"{self.repeats} permutations of {num_blocks} blocks, {left} points left over in each; {self.variant}"
        return block_scores(self.metric, evaluation, blocks, tau, self.tolerance, kappa=kappa, note=note)

    def _counts(self, num_blocks: int, kappa: int, tau: int, stream: torch.Generator) -> Tensor:
        """How often each anchor is repeated, [M, kappa] with rows summing to tau."""
        if self.variant == "forced":
            first = torch.randint(1, tau - 1, (num_blocks, 1), generator=stream)  # 1..tau-2: 1..8 of 10
            return torch.cat([first, tau - first], 1)
        return uniform_counts(num_blocks, kappa, tau, stream)
