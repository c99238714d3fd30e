"""The area under a ROC curve, with what each point contributes to it."""

from __future__ import annotations

import math

import torch
from torch import Tensor


def roc_area(negatives: Tensor, positives: Tensor) -> tuple[float, float, Tensor]:
    """P(positive > negative) + P(equal) / 2, its standard error, and contributions [M + N] whose mean it is.

    The standard error is DeLong's (DeLong et al. 1988): each of the M negatives and N positives contributes the
    share of the other group on its right side, and the two groups are independent. Negatives come first.

    >>> roc_area(torch.tensor([0.0, 2.0]), torch.tensor([1.0, 3.0]))[0]
    0.75
    """
    below = _share_below(positives, negatives)  # of each positive: the share of negatives under it
    above = 1 - _share_below(negatives, positives)  # of each negative: the share of positives over it
    m, n = len(negatives), len(positives)
    area = float(below.mean())
    total = m + n
    points = torch.cat([area + (total / m) * (above - area), area + (total / n) * (below - area)])
    if min(m, n) < 2:
        return area, math.nan, points
    return area, math.sqrt(float(above.var()) / m + float(below.var()) / n), points


def _share_below(values: Tensor, others: Tensor) -> Tensor:
    """Share of `others` below each value; equal ones count half."""
    values, others = values.double(), others.double().sort().values
    left = torch.searchsorted(others, values, right=False)
    right = torch.searchsorted(others, values, right=True)
    return (left + right).double() / (2 * len(others))
