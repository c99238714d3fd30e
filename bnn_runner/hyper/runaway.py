"""Precisions that run away: the evidence grows all the way to a bound, or levels off and prefers no value."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from bnn_runner.base import PrecisionProblem
from bnn_runner.hyper.search_end import GRADIENT_NATS, evidence_terms
from bnn_runner.hyper.tied_precisions import named


def is_flat(problem: PrecisionProblem, logs: Tensor, ties: Tensor) -> Tensor:
    """Where both halves of the derivative, ½ γ_g and ½ λ_g ‖w_g‖², are below `GRADIENT_NATS`, [G].

    A derivative of zero is then no sign of a maximum. The data inform none of the group's weights at this precision,
    and a larger one changes nothing: the search ran away with the group, or the outputs never depended on it.
    """
    dimensions, penalties = evidence_terms(problem, logs, ties)
    return (0.5 * dimensions <= GRADIENT_NATS) & (0.5 * penalties <= GRADIENT_NATS)


def hold(
    rule: str, problem: PrecisionProblem, ties: Tensor, logs: Tensor, stuck: Tensor, begin: Tensor, high: float
) -> tuple[Tensor, tuple[str, ...]]:
    """Where to hold the variables `stuck` [G] that ran away, [G], and notes that name their groups.

    One of several that ran upwards is held at the first of begin, 10 begin, 100 begin … at which the evidence no
    longer depends on it, so that the value does not depend on where the search gave up. One precision for all weights,
    one that ran downwards, and one that never levels off below `high` keep the value that the search began with;
    so do all where none is left to search.
    """
    at = torch.where(stuck, begin, logs)
    rising = stuck & (logs > begin + 1e-6) if not bool(stuck.all()) else torch.zeros_like(stuck)
    level = stuck & ~rising & is_flat(problem, at, ties)
    while bool(rising.any()):
        flat = rising & is_flat(problem, at, ties)
        level, rising = level | flat, rising & ~flat
        past = rising & (at + math.log(10) >= math.log(high))
        rising &= ~past
        at = torch.where(past, begin, torch.where(rising, at + math.log(10), at))
    notes = []
    for members, words in (
        (level, "is held at {}, from where on the evidence does not depend on it"),
        (stuck & ~level, "keeps its start value ({})"),
    ):
        if bool(members.any()):
            values = ", ".join(dict.fromkeys(f"{v:.3g}" for v in at[members].exp().tolist()))
            which = named(problem, members[ties])
            notes.append(f"hyper={rule}: the precision of {which} ran away, and {words.format(values)}")
    return at, tuple(notes)
