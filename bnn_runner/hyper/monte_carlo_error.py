"""How sure a hyperparameter rule can be of effective dimensions that are means over posterior samples."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

TOO_UNSURE = 0.25
"""Standard error of a logarithm of a precision, above which the samples are called too few."""


def dimension_errors(samples: Tensor, ties: Tensor, names: Sequence[str]) -> tuple[dict[str, Any], tuple[str, ...]]:
    """Facts for the row and notes on precisions λ = γ/‖w‖² whose γ is the mean over S samples.

    `samples` [S, T] are of the T groups `names`, `ties` [T] which variable each belongs to. The standard error
    of log λ is that of γ over γ (at a fixed point it is less, as γ falls where λ grows). A γ that is
    not above its error sets no precision.
    """
    count = int(ties.max()) + 1
    each = torch.zeros(len(samples), count, dtype=samples.dtype).index_add(1, ties, samples)  # [S, variables]
    relative = each.std(0) / len(samples) ** 0.5 / each.mean(0).clamp_min(torch.finfo(each.dtype).tiny)
    report = {"hyper_samples": len(samples), "hyper_log_standard_error": float(relative.max())}
    unsure = relative > TOO_UNSURE
    if not bool(unsure.any()):
        return report, ()
    members = [n for n, v in zip(names, ties.tolist(), strict=True) if bool(unsure[v])]
    which = "all weights" if len(members) == len(names) else ", ".join(members)
    needed = len(samples) * float((relative[relative.isfinite()].max() / TOO_UNSURE).square().clamp_max(1e6))
    note = (
        f"{len(samples)} samples are too few for the precision of {which}: the standard error of its logarithm is "
        f"{min(float(relative.max()), 99):.2g}. About {needed:.0f} would do (method.samples), or another hyper.family"
    )
    return report, (note,)
