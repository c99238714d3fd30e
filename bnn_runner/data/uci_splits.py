"""The published splits of the UCI regression sets, made from their rules and checked against the stored index files.

Standard (Hernandez-Lobato and Adams, 2015): the n-th of the permutations that
`numpy.random.RandomState(1)` gives one after the other; its first 90 % are training points. This
reproduces the index files of all nine sets, all splits.

Gap (Foong et al., 2019, "'In-between' uncertainty in Bayesian neural networks"): sorted along
feature k, the N/3 points in the middle are the test set. This reproduces the index files wherever
no value is shared across an edge of the gap; where one is, the published choice among equal values
follows no known rule, and the index files are needed.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from bnn_runner.data.sources import WHERE_ELSE
from bnn_runner.errors import UserError

Rows = np.ndarray[tuple[int, ...], np.dtype[np.int64]]


@dataclass(frozen=True)
class Halves:
    """Training and test rows of a split, each ascending, and how they were come by."""

    train: Tensor
    test: Tensor
    note: str


def standard_test_size(num_rows: int) -> int:
    """Test points of a standard split."""
    return num_rows - round(0.9 * num_rows)


def gap_test_size(num_rows: int) -> int:
    """Test points of a gap split: an even number nearest to a third."""
    return 2 * round(num_rows / 6)


def standard_test_rows(num_rows: int, split: int) -> Rows:
    """Test rows of standard split `split`."""
    # The published splits are those of this old generator, whose stream NumPy keeps as it is.
    random = np.random.RandomState(1)
    for _ in range(split + 1):
        order = random.permutation(num_rows)
    return order[round(0.9 * num_rows) :]


def gap_test_rows(feature: np.ndarray[tuple[int], np.dtype[np.float64]]) -> Rows | None:
    """Test rows of the gap split along the values `feature` [N]; None where equal values straddle an edge."""
    order = np.argsort(feature, kind="stable")
    size = gap_test_size(len(feature))
    start = len(feature) // 2 - size // 2
    for edge in (start, start + size):
        if feature[order[edge - 1]] == feature[order[edge]]:
            return None
    return order[start : start + size]


def halves(rule: Rows | None, num_rows: int, folder: Path, split: int, what: str) -> Halves:
    """The split from `rule` (its test rows) and from the index files in `folder`, which win where they differ.

    `what` names the split in messages. Raises `UserError` where neither is to be had, or the files
    are no split of the rows.
    """
    paths = [folder / f"index_{part}_{split}.txt" for part in ("train", "test")]
    absent = [str(path) for path in paths if not path.is_file()]
    if absent and rule is None:
        raise UserError(
            f"The test points of {what} are not known. Equal values of the feature lie on both sides of an edge of the "
            f"gap, so the index files are needed and are missing: {', '.join(absent)}. "
            f"Put them there, choose another data.split, {WHERE_ELSE}"
        )
    if absent:
        assert rule is not None
        return _from_test(rule, num_rows, f"{what}: made by its rule; no index files there to compare with.")
    train, test = (_read_rows(path) for path in paths)
    if not np.array_equal(np.sort(np.concatenate([train, test])), np.arange(num_rows)):
        raise UserError(
            f"{paths[0]} and {paths[1].name} are no split of the data. Together they must name each row from 0 to "
            f"{num_rows - 1} once. Replace them, or take them away."
        )
    if rule is None:
        note = f"{what}: read from the index files."
    elif set(rule.tolist()) == set(test.tolist()):
        note = f"{what}: made by its rule, equal to the index files."
    else:
        note = f"{what}: the index files differ from the published split, and were used."
    return _from_test(test, num_rows, note)


def _from_test(test: Iterable[int], num_rows: int, note: str) -> Halves:
    chosen = torch.zeros(num_rows, dtype=torch.bool)
    chosen[torch.as_tensor(np.asarray(test))] = True
    rows = torch.arange(num_rows)
    return Halves(rows[~chosen], rows[chosen], note)


def _read_rows(path: Path) -> Rows:
    try:
        return np.loadtxt(path, dtype=np.int64, ndmin=1)
    except (ValueError, OSError) as error:
        raise UserError(f"{path} cannot be read. One row number a line is expected ({error}). Replace it.") from error
