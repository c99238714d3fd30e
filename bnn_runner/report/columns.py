"""The columns of a result table: their scores, names and order, and which are shown by default."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from bnn_runner.errors import UserError, close_matches


@dataclass(frozen=True, order=True)
class Column:
    """One kind of score: a metric on a split, at a block size tau and a number of anchors kappa if it has them."""

    metric: str
    split: str = "test"
    tau: int | None = None
    kappa: int | None = None

    @property
    def label(self) -> str:
        """For people: `joint tau=10`, `ood_auroc (ood/kmnist)`."""
        words = [self.metric]
        if self.kappa is not None:
            words.append(f"kappa={self.kappa}")
        elif self.tau is not None:
            words.append(f"tau={self.tau}")
        if self.split != "test":
            words.append(f"({self.split})")
        return " ".join(words)

    @property
    def key(self) -> str:
        """For files: `joint_tau10`, `dyadic_tau10_kappa2`, `ood_auroc@ood/kmnist`."""
        key = self.metric
        if self.tau is not None:
            key += f"_tau{self.tau}"
        if self.kappa is not None:
            key += f"_kappa{self.kappa}"
        return key if self.split == "test" else f"{key}@{self.split}"


# Patterns of metric names by topic; the order on the page is GROUP_ORDER.
GROUPS: tuple[tuple[str, str], ...] = (
    ("joint", r"joint|dyadic"),
    ("ood", r"ood|out_of_dist"),
    (
        "calibration",
        r"ece|calib|brier|coverage|interval|crps|pit|sharp|misclass|entropy|mutual|aleatoric|epistemic|variance|_std|"
        r"uncertainty|temperature|confidence|width",
    ),
    ("fit", r"."),
)
GROUP_ORDER = ("fit", "joint", "calibration", "ood")

# A headline is a metric by pattern (for block scores with one block size): enough to compare methods on one screen.
_HEADLINES: tuple[tuple[str, int | None, int | None], ...] = (
    (r"marginal(_loglik)?", None, None),
    (r"joint(_loglik)?(_exact)?", 10, None),
    (r"dyadic(_loglik)?", None, 2),
    (r"accuracy", None, None),
    (r"rmse", None, None),
    (r"ece", None, None),
    (r"crps", None, None),
    (r"(ood_)?auroc", None, None),
)


# Companions of a log-likelihood: the same with fewer draws, the effective number of draws, and, of an exact one, its
# estimate from draws.
AT_DRAWS, EFFECTIVE_DRAWS, BY_DRAWS = "_at_draws", "_effective_draws", "_by_draws"
# Of a posterior with a centre: the score of the centre, and the posterior's minus it.
CENTRE, MINUS_CENTRE = "centre_", "_minus_centre"
# Of older results: the exact score, next to the one from draws.
EXACT = "_exact"


def is_companion(metric: str) -> bool:
    """Whether a metric only belongs to another one: its convergence in the number of draws, or its centre's value."""
    return metric.endswith((AT_DRAWS, EFFECTIVE_DRAWS, BY_DRAWS, MINUS_CENTRE)) or metric.startswith(CENTRE)


def group_of(metric: str, split: str = "test") -> str:
    """fit, joint, calibration or ood."""
    if split.startswith(("ood", "shift")):
        return "ood"
    return next(group for group, pattern in GROUPS if re.search(pattern, metric))


def _headline_place(column: Column) -> int | None:
    for place, (pattern, tau, kappa) in enumerate(_HEADLINES):
        if re.fullmatch(pattern, column.metric) is None:
            continue
        about_ood = "auroc" in pattern
        if column.split != "test" and not (about_ood and column.split.startswith("ood")):
            continue
        if place == 0 and (column.tau or 1) != 1:
            continue
        if kappa is not None and column.kappa != kappa:
            continue
        if tau is not None and (column.tau != tau or column.kappa is not None):
            continue
        return place
    return None


def in_order(columns: Iterable[Column]) -> list[Column]:
    """Columns in the order of the tables: headlines first, then by topic, metric and block."""

    def place(column: Column) -> tuple[object, ...]:
        headline = _headline_place(column)
        group = GROUP_ORDER.index(group_of(column.metric, column.split))
        first = len(_HEADLINES) if headline is None else headline
        return (first, group, column.metric, column.split, column.kappa or 0, column.tau or 0)

    return sorted(set(columns), key=place)


def select_columns(columns: Sequence[Column], wanted: str | None) -> list[Column]:
    """The columns to show.

    Args:
        columns: all columns.
        wanted: None (headlines), "all", or metric names and column keys separated by commas.

    Raises:
        UserError: that lists every unknown name.
    """
    ordered = in_order(columns)
    if wanted is None or wanted == "headline":
        headlines = [c for c in ordered if _headline_place(c) is not None]
        return headlines or ordered
    if wanted == "all":
        return ordered
    names = [name.strip() for name in wanted.split(",") if name.strip()]
    known = sorted({c.metric for c in ordered} | {c.key for c in ordered})
    problems = [unknown("metric", name, known, "--metrics") for name in names if name not in known and name != "dee"]
    if "dee" in names:
        problems.append("dee (ensemble equivalent) compares runs and is not a column. Use --equivalents.")
    if not names:
        problems.append("--metrics must name metrics separated by commas, or all; got none.")
    if problems:
        raise UserError(*problems)
    selected: list[Column] = []
    for name in names:
        selected += [c for c in ordered if name in (c.metric, c.key) and c not in selected]
    return selected


def unknown(what: str, value: str, known: Iterable[str], option: str) -> str:
    """The message for an unknown name, with similar known ones."""
    known = sorted(known)
    near = close_matches(value, known, cutoff=0.5)
    hint = f" Did you mean {' or '.join(near)}?" if near else ""
    shown = ", ".join(known[:30]) + (", …" if len(known) > 30 else "")
    return f"Unknown {what} {value!r}.{hint} {option} must be one of: {shown}."
