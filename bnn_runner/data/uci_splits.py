"""The published splits of the UCI regression sets: recomputed from their rules, and compared with the index files.

Standard (Hernández-Lobato and Adams, 2015): the n-th successive permutation of `numpy.random.RandomState(1)`; its
first 90 % are training points. This reproduces the index files of all splits of all nine sets.

Gap (Foong et al., 2019, "'In-between' uncertainty in Bayesian neural networks"): sorted along feature k, the N/3
points in the middle are the test set. This reproduces the index files unless equal values lie on both sides of an
edge of the gap: the published choice among them follows no known rule, and the index files are required.
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
    """Training and test rows of a split, each ascending, and a note on where they come from."""

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
    # The published splits come from this legacy generator, whose stream NumPy keeps unchanged.
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
    """The split from `rule` (its test rows) and the index files in `folder`, which take precedence.

    Args:
        rule: test rows by the rule; None if it does not decide them.
        num_rows: of the data set.
        folder: of the index files.
        split: its number.
        what: name of the split in messages.

    Raises:
        UserError: if neither is available, or the files are not a split of the rows.
    """
    paths = [folder / f"index_{part}_{split}.txt" for part in ("train", "test")]
    absent = [str(path) for path in paths if not path.is_file()]
    if absent and rule is None:
        raise UserError(
            f"{what} requires its index files; missing: {', '.join(absent)}. Equal values of the feature lie on both "
            f"sides of an edge of the gap. Put the files there, use another data.split, {WHERE_ELSE}"
        )
    if absent:
        assert rule is not None
        return _from_test(rule, num_rows, f"{what}: computed by its rule; there are no index files to compare with.")
    train, test = (_read_rows(path) for path in paths)
    if not np.array_equal(np.sort(np.concatenate([train, test])), np.arange(num_rows)):
        raise UserError(
            f"{paths[0]} and {paths[1].name} together must name each row from 0 to {num_rows - 1} exactly once. "
            "Replace or delete them."
        )
    if rule is None:
        note = f"{what}: read from the index files."
    elif set(rule.tolist()) == set(test.tolist()):
        note = f"{what}: computed by its rule, equal to the index files."
    else:
        note = f"{what}: read from the index files, which differ from the published split."
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
        raise UserError(f"Could not read {path} as one row number per line ({error}). Replace it.") from error
