"""points.npz: what each score of a cell is the mean of, by point or block, so that reports can pair two cells."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from bnn_runner.report.columns import AT_DRAWS, BY_DRAWS, EFFECTIVE_DRAWS, MINUS_CENTRE, Column
from bnn_runner.report.point_scores import FILE, META
from bnn_runner.runtime.files import write_atomically
from bnn_runner.scoring import Evaluation, Score

_LEFT_OUT = (AT_DRAWS, EFFECTIVE_DRAWS, BY_DRAWS, MINUS_CENTRE)


def write_points(folder: Path, scores: Sequence[Score], evaluation: Evaluation, seed: int) -> None:
    """Writes the points of every score that has them, in float32; those of single points in the order of their ids.

    Each array has two hashes: of its test set, and of its units (points or blocks). Arrays with the same units can be
    paired entry by entry, whatever the method and the seed.
    """
    arrays: dict[str, np.ndarray] = {}
    meta: dict[str, tuple[str, str]] = {}
    for score in scores:
        if score.points is None or score.metric.endswith(_LEFT_OUT):
            continue
        key = Column(score.metric, score.split, score.tau, score.kappa).key
        values, units, test_set = _identified(score, score.points, evaluation, seed)
        arrays[key] = values.to(torch.float32).cpu().numpy()
        meta[key] = (units, test_set)
    arrays[META] = np.frombuffer(json.dumps(meta).encode(), dtype=np.uint8)
    write_atomically(folder / FILE, lambda f: np.savez(f, **arrays))  # type: ignore[arg-type]


def _identified(score: Score, points: Tensor, evaluation: Evaluation, seed: int) -> tuple[Tensor, str, str]:
    """The values, the hash of their units and that of the test set."""
    own = evaluation.splits[score.split].ids
    if len(points) == len(own):
        return points[own.argsort(stable=True)], _hash(own), _hash(own)
    test = evaluation.test.ids
    if len(points) == len(test) + len(own):  # test points against an out-of-distribution set
        order = torch.cat([test.argsort(stable=True), len(test) + own.argsort(stable=True)])
        return points[order], _hash(test, own), _hash(test)
    return points, _hash(own) + f"/{seed}", _hash(own)  # blocks, which depend on the seed


def _hash(*ids: Tensor) -> str:
    digest = hashlib.blake2b(digest_size=8)
    for one in ids:
        digest.update(one.sort().values.to(torch.int64).cpu().numpy().tobytes() + b"|")
    return digest.hexdigest()
