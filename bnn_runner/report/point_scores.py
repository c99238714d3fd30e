"""The scores of single test points or blocks that a cell keeps in points.npz."""

from __future__ import annotations

import json
import zipfile
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import numpy as np

FILE = "points.npz"
META = "meta"


@dataclass(frozen=True)
class PointScores:
    """What one score is the mean of.

    Attributes:
        values: one number per point or block, [M].
        units: the same text for arrays whose entries are of the same points or blocks, in the same order.
        test_set: the same text for arrays from the same test points.
    """

    values: np.ndarray
    units: str
    test_set: str


def read_points(folder: Path, key: str) -> PointScores | None:
    """The points of the score with this column key; None if the cell has none, or a damaged file."""
    import numpy as np

    try:
        with np.load(folder / FILE) as file:
            if key not in file.files:
                return None
            units, test_set = json.loads(bytes(file[META]).decode())[key]
            return PointScores(file[key].astype(np.float64), units, test_set)
    except (OSError, ValueError, KeyError, zipfile.BadZipFile):
        return None
