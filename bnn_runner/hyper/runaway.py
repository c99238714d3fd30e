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

    A derivative of zero then does not indicate a maximum: at this precision the data have no influence on the group's
    weights, and a larger one changes nothing. The precision ran away, or the outputs never depended on the group.
    """
    dimensions, penalties = evidence_terms(problem, logs, ties)
    return (0.5 * dimensions <= GRADIENT_NATS) & (0.5 * penalties <= GRADIENT_NATS)


def hold(
    rule: str, problem: PrecisionProblem, ties: Tensor, logs: Tensor, stuck: Tensor, begin: Tensor, high: float
) -> tuple[Tensor, tuple[str, ...]]:
    """Log precisions with the variables that ran away held, and notes that name their groups.

    One of several that ran upwards is held at the first of begin, 10 begin, 100 begin … at which the evidence no
    longer depends on it, so that the value does not depend on where the search stopped. A single precision for all
    weights, one that ran downwards, and one that never levels off below `high` keep their start values; so do all
    of them where none is left to search.

    Args:
        rule: its name, for the notes.
        problem: the evidence.
        ties: which variable each group belongs to, [T].
        logs: log precisions, [G].
        stuck: the variables that ran away, [G].
        begin: start values, [G].
        high: largest precision.
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
