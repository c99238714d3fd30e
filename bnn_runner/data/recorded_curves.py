"""Recorded one-dimensional regression sets, read from the files in which they were published."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from bnn_runner.data.downloads import ensure
from bnn_runner.data.holdout_fraction import fraction_problems, halves_of
from bnn_runner.data.sources import File, Source
from bnn_runner.data.splits import Sizes, divide
from bnn_runner.data.tables import table_task
from bnn_runner.errors import raise_all
from bnn_runner.rng import generator
from bnn_runner.tasks import Task, TaskSpec

Array = np.ndarray[tuple[int, ...], np.dtype[np.float64]]
WIDE_GAP = 0.05
"""A stretch without points counts as a gap if it is at least this share of the range."""
REACH, NUM_OOD = 0.3, 100
"""The set "far" reaches this share of the range beyond both ends."""


@dataclass(frozen=True)
class Recorded:
    """A set as published: its files, their number of rows, and a reader of rows [N, 2] of (x, y) from a folder."""

    source: Source
    rows: int
    read: Callable[[Path], Array]


def _snelson(folder: Path) -> Array:
    return np.stack([np.loadtxt(folder / f"train_{kind}") for kind in ("inputs", "outputs")], axis=1)


def _pairs(name: str) -> Callable[[Path], Array]:
    return lambda folder: np.load(folder / name, allow_pickle=False).astype(np.float64)


def _two_halves(name: str) -> Callable[[Path], Array]:
    """Columns x_train, y_train, x_test, y_test: the halves are pooled and split again by the seed."""

    def read(folder: Path) -> Array:
        both = np.load(folder / name, allow_pickle=False).astype(np.float64)
        return np.concatenate([both[:, :2], both[:, 2:]])

    return read


def _co2(folder: Path) -> Array:
    """Date in years and parts per million; weeks without a measurement are left out."""
    dates, values = np.loadtxt(folder / "co2.csv", delimiter=",", skiprows=1, dtype=str, unpack=True)
    known = values != ""
    days = np.array([f"{d[:4]}-{d[4:6]}-{d[6:]}" for d in dates[known]], dtype="datetime64[D]")
    years = 1970 + days.astype(np.int64) / 365.25
    return np.stack([years, values[known].astype(np.float64)], axis=1)


def _source(name: str, folder: str, files: dict[str, str], where: str) -> Source:
    """Files by name with their SHA-256 sums, to be downloaded by hand."""
    listed = tuple(File(file, checksum=checksum) for file, checksum in files.items())
    return Source(name, folder, listed, by_hand=f"Download them by hand from {where}.")


DUN = "https://github.com/cambridge-mlg/DUN"
SETS = {
    "snelson": Recorded(
        _source(
            "snelson",
            "snelson",
            {
                "train_inputs": "fd745fae3686ee6b1e03feef7bf4be1b577231ec7406e0e84715fcb37731e44c",
                "train_outputs": "5f8752c19dbd536ad6435eed26d3e96b0d8101fa194ca31f05d10ab2a5bd9205",
            },
            "https://github.com/widedeepnetworks/widedeepnetworks",
        ),
        200,
        _snelson,
    ),
    "matern_1d": Recorded(
        _source(
            "matern_1d",
            "toy1d",
            {"matern_1d.npy": "060bf7d82f142b295a81ef16b044609e02da37ef7e9f6b7f77a743d753c330ec"},
            DUN,
        ),
        400,
        _pairs("matern_1d.npy"),
    ),
    "agw": Recorded(
        _source("agw", "toy1d", {"agw.npy": "62ba3a19b4559f3cebb2a0bba6118c96b55355d94b2c7cd115394ce0420caf25"}, DUN),
        400,
        _pairs("agw.npy"),
    ),
    "my_1d": Recorded(
        _source(
            "my_1d", "toy1d", {"my_1d.npy": "1dbed6b32050ea86ba9279c9797bdc6b25bf5b4254bba371289ecdcbd6eea5cc"}, DUN
        ),
        1002,
        _two_halves("my_1d.npy"),
    ),
    "co2": Recorded(
        _source(
            "co2",
            "co2",
            {"co2.csv": "16695fa2786e53414e5a6b54767a3fdf5de99cfbc68617f69d1362d92776a92f"},
            "https://github.com/statsmodels/statsmodels (statsmodels/datasets/co2)",
        ),
        2225,
        _co2,
    ),
}


@dataclass(frozen=True, kw_only=True)
class RecordedCurve:
    """One input, one output: snelson, matern_1d, agw, my_1d (both with gaps) or co2 (Mauna Loa, weekly).

    `test_fraction` of the points, drawn by the seed, is the test set. The sets "gap" (stretches without inputs of at
    least a twentieth of the range, if there are any) and "far" (beyond both ends) have no targets.
    """

    name: str
    test_fraction: float
    val_fraction: float
    train_size: int | None
    test_size: int | None

    def spec(self) -> TaskSpec:
        """What is known before reading. Raises `UserError` for invalid values."""
        problems = []
        if self.name not in SETS:
            problems.append(f"data.name must be one of {', '.join(SETS)}; got {self.name}.")
        problems += fraction_problems(self.test_fraction)
        train, test = (0, 0) if problems else halves_of(SETS[self.name].rows, self.test_fraction)
        raise_all(problems + self._sizes.problems(train, test))
        return TaskSpec(self.name, "regression", (1,), 1, self.val_fraction)

    @property
    def _sizes(self) -> Sizes:
        return Sizes(self.val_fraction, self.train_size, self.test_size)

    def sources(self) -> Sequence[Source]:
        return (SETS[self.name].source,)

    def partner_sources(self) -> Mapping[str, Source]:
        return {}

    def load(self, data_dir: Path, seed: int) -> Task:
        """Read the points. Raises `UserError` if a file is missing or not the published one."""
        spec, recorded = self.spec(), SETS[self.name]
        folder = ensure(recorded.source, data_dir)
        points = torch.from_numpy(recorded.read(folder))
        order = torch.randperm(len(points), generator=generator(seed, "split", self.name))
        num_train, _ = halves_of(len(points), self.test_fraction)
        train, test = order[:num_train].sort().values, order[num_train:].sort().values
        parts = divide(train, test, self._sizes, seed, None, None)
        x, y = points[:, :1], points[:, 1:]
        notes: tuple[str, ...] = ()
        if self.name == "co2":
            weeks = len((folder / "co2.csv").read_text().splitlines()) - 1
            notes = (f"weeks without a measurement are left out: {weeks - len(points)} of {weeks}",)
        return table_task(spec, x, y, parts, ood=beyond(x[:, 0]), notes=notes)


def beyond(x: Tensor) -> dict[str, Tensor]:
    """Inputs [M, 1] where points x [N] are not: inside gaps, and beyond both ends."""
    ordered = x.sort().values
    span, steps = ordered[-1] - ordered[0], ordered.diff()
    found = {}
    wide = (steps > WIDE_GAP * span).nonzero().flatten()
    if len(wide):
        share = steps[wide] / steps[wide].sum()
        # The outermost tenths of a gap touch the data and are left out.
        pieces = [
            torch.linspace(float(ordered[i] + 0.1 * steps[i]), float(ordered[i + 1] - 0.1 * steps[i]), max(2, n))
            for i, n in zip(wide.tolist(), (share * NUM_OOD).round().long().tolist(), strict=True)
        ]
        found["gap"] = torch.cat(pieces).double().unsqueeze(1)
    reach = REACH * span * torch.linspace(0, 1, NUM_OOD // 2 + 1, dtype=torch.float64)[1:]
    found["far"] = torch.cat([(ordered[0] - reach).flip(0), ordered[-1] + reach]).unsqueeze(1)
    return found
