"""What a reader of any table must know of a row: one table of kinds, each with its mark's footnote.

Kinds are decided by the facts that a run keeps in cell.json, never by the text of its notes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

FAR_NATS, RHAT_LIMIT, LEAST_DIVERSITY = 1.0, 1.1, 0.01
"""As in `laplace.newton_decrement`, `mcmc.summary` and `posteriors.function_diversity`, which are not imported: they
need PyTorch."""
_UNFINISHED = ("not converged", "diverged", "v* not reached", "failed")
Facts = Mapping[str, Any]


@dataclass(frozen=True)
class Kind:
    """A kind of mark.

    Attributes:
        name: in CSV files.
        text: the footnote.
        applies: whether the facts of a run have it.
        biased: whether its scores are not those of the method, so that a row with it is never bold.
    """

    name: str
    text: str
    applies: Callable[[Facts], bool]
    biased: bool = False


KINDS: tuple[Kind, ...] = (
    Kind(
        "unmixed_chains",
        f"The chains have not mixed (R-hat above {RHAT_LIMIT:g} in function space); such rows are never bold.",
        lambda facts: _above(facts, "rhat", RHAT_LIMIT),
        biased=True,
    ),
    Kind(
        "no_gradient_noise",
        "All training points were in one batch, so the path of SGD has no gradient noise: its variance is only drift.",
        lambda facts: facts.get("gradient_noise") is False,
    ),
    Kind(
        "one_function",
        "The draws hardly differ, so this is nearly a point estimate.",
        lambda facts: _above(facts, "function_diversity", LEAST_DIVERSITY, below=True),
    ),
    Kind(
        "worse_than_centre",
        "On validation data, worse than its own centre by more than two paired standard errors.",
        lambda facts: bool(facts.get("worse_than_centre")),
    ),
    Kind(
        "large_decrement",
        f"The weights are more than {FAR_NATS:g} nat (Newton decrement) from the optimum that the evidence assumes; "
        "method.mode=tangent takes the evidence at an optimum.",
        lambda facts: (
            _about_the_evidence(facts)
            and facts.get("mode", "network") == "network"
            and _above(facts, "newton_decrement_nats", FAR_NATS)
        ),
    ),
    Kind(
        "evidence_below_constant",
        "The evidence is below that of a constant predictor.",
        lambda facts: _about_the_evidence(facts) and bool(facts.get("evidence_below_constant")),
    ),
    Kind(
        "precision_at_bound",
        "A prior precision is at the end of its range.",
        lambda facts: "at bound" in str(facts.get("hyper_status", "")),
    ),
    Kind(
        "search_not_converged",
        "The search for the prior precision did not converge.",
        lambda facts: any(word in str(facts.get("hyper_status", "")) for word in _UNFINISHED),
    ),
)


def kinds_of(facts: Facts) -> tuple[str, ...]:
    """The names of the kinds that the facts of a run have, in the order of `KINDS`."""
    return tuple(kind.name for kind in KINDS if kind.applies(facts))


def is_biased(names: Iterable[str]) -> bool:
    """Whether one of these kinds makes scores those of something else than the method."""
    return any(kind.biased for kind in KINDS if kind.name in names)


def letters(rows: Iterable[Iterable[str]]) -> dict[str, str]:
    """A letter for each kind that some row has, in the order of `KINDS`."""
    present = {name for row in rows for name in row}
    found = [kind.name for kind in KINDS if kind.name in present]
    return {name: chr(ord("a") + i) for i, name in enumerate(found)}


def mark_text(names: Iterable[str], letter: Mapping[str, str]) -> str:
    """` [a, b]` after the name of a row; empty without marks."""
    found = sorted(letter[name] for name in names)
    return f" [{', '.join(found)}]" if found else ""


def footnotes(rows: Sequence[tuple[str, Counter[str], int]], letter: Mapping[str, str]) -> list[str]:
    """One line for each letter; rows are (name, seeds with each kind, seeds). Where only some seeds have it, they are
    named.
    """
    lines = []
    for kind in KINDS:
        if kind.name not in letter:
            continue
        some = [f"{name} ({c[kind.name]} of {n} seeds)" for name, c, n in rows if 0 < c[kind.name] < n]
        partly = f" In some seeds only: {'; '.join(some)}." if some else ""
        lines.append(f"[{letter[kind.name]}] {kind.text}{partly}")
    return lines


def _about_the_evidence(facts: Facts) -> bool:
    """Not where validation data selected the precision: the row is then about its predictions."""
    return facts.get("selected_by") != "validation"


def _above(facts: Facts, name: str, limit: float, below: bool = False) -> bool:
    value = facts.get(name)
    if not isinstance(value, int | float):
        return False
    return value < limit if below else value > limit
