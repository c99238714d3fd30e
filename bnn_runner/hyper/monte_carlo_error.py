"""Monte Carlo error of precisions whose effective dimensions are means over posterior samples."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

LARGEST_ERROR = 0.25
"""Standard error of log λ above which a note says that the samples are too few."""


def dimension_errors(samples: Tensor, ties: Tensor, names: Sequence[str]) -> tuple[dict[str, Any], tuple[str, ...]]:
    """Facts for the row, and notes, on precisions λ = γ/‖w‖² whose γ is the mean over S samples.

    The standard error of log λ is that of γ over γ (less at a fixed point, since γ falls as λ grows). A γ
    no larger than its error determines no precision.

    Args:
        samples: of the effective dimension of each group, [S, T].
        ties: which variable each group belongs to, [T].
        names: the T groups.
    """
    count = int(ties.max()) + 1
    each = torch.zeros(len(samples), count, dtype=samples.dtype).index_add(1, ties, samples)  # [S, variables]
    relative = each.std(0) / len(samples) ** 0.5 / each.mean(0).clamp_min(torch.finfo(each.dtype).tiny)
    report = {"hyper_samples": len(samples), "hyper_log_standard_error": float(relative.max())}
    unsure = relative > LARGEST_ERROR
    if not bool(unsure.any()):
        return report, ()
    members = [n for n, v in zip(names, ties.tolist(), strict=True) if bool(unsure[v])]
    which = "all weights" if len(members) == len(names) else ", ".join(members)
    needed = len(samples) * float((relative[relative.isfinite()].max() / LARGEST_ERROR).square().clamp_max(1e6))
    note = (
        f"{len(samples)} samples are too few for the precision of {which}: the standard error of log λ is "
        f"{min(float(relative.max()), 99):.2g}. Use about {needed:.0f} (method.samples), or another hyper.family"
    )
    return report, (note,)
