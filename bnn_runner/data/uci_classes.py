"""UCI classification sets as used by Immer et al. (2021), read from the layout of AlexImmer/BNN-predictions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, Literal

import numpy as np
import torch

from bnn_runner.data.downloads import ensure
from bnn_runner.data.holdout_fraction import fraction_problems, halves_of
from bnn_runner.data.sources import File, Source
from bnn_runner.data.splits import Sizes, divide, seeded_order
from bnn_runner.data.tables import table_task
from bnn_runner.errors import raise_all
from bnn_runner.rng import generator
from bnn_runner.tasks import Task, TaskSpec

SOURCE = "https://github.com/AlexImmer/BNN-predictions"
Array = np.ndarray[tuple[int, ...], np.dtype[np.float64]]


@dataclass(frozen=True)
class Table:
    """One set as published: SHA-256 sums by file; the files `labels` hold the classes, or else the last column does."""

    folder: str
    files: dict[str, str]
    labels: tuple[str, ...]
    rows: int
    features: int
    classes: int
    delimiter: str | None = None


def _presplit(folder: str, name: str, checksums: tuple[str, ...], rows: int, features: int) -> Table:
    """A set in two halves, which are pooled."""
    files = [f"{name}_{kind}_{part}.csv" for kind in "Xy" for part in ("tr", "te")]
    return Table(folder, dict(zip(files, checksums, strict=True)), tuple(files[2:]), rows, features, 2)


def _pair(folder: str, inputs: str, labels: str, rows: int, features: int, classes: int) -> Table:
    """A set in the two files X.txt and Y.txt, with these checksums."""
    return Table(folder, {"X.txt": inputs, "Y.txt": labels}, ("Y.txt",), rows, features, classes)


SETS = {
    "australian": _presplit(
        "australian_presplit",
        "australian_scale",
        (
            "d63ea54a248e27d7f09353d23aef75a9ccf1f94a477e3a1847a2ffcaffb42bd6",
            "a4c45c6ccf5205b85244f8a3039085c276bc58ba1cb60e7423e276eba1eccb05",
            "161e7784bf00bc6cbe42c37268097ea3e13889860dd2b44f10b976799577da7b",
            "6fb798e2e6c64e806b853e082d1388258cff398e313cb0400a43e2b025334cfc",
        ),
        690,
        14,
    ),
    "breast_cancer_uci": _presplit(
        "breast_cancer_scale_presplit",
        "breast_cancer_scale",
        (
            "a703c82d727aea8d7993c6e58e06b61a8cfe222b3c38c407f79a789c7e64a086",
            "da7f13608ac4755c1220e0d5016a41d7dd479db9037f22146565545bf9290597",
            "7126e25c14ab7dd8da1cdb2a202a47e18ed0e40a6210e2b039dbef51ad47410c",
            "7a925efa2bbcb94a06539338a363b1c1b51373e53df857ec19b9cef9a73e7278",
        ),
        683,
        10,
    ),
    "ionosphere": Table(
        "ionosphere",
        {"ionosphere.data": "a393249211ec3c45c247cbe7d79310023c6cc17c911646ed3f57a18debabba3e"},
        (),
        351,
        34,
        2,
        ",",
    ),
    "glass": _pair(
        "glass",
        "ff0df47911e82b92da63c21dbd9c0825d3944c8c4748360c04bd65d3a2630cff",
        "58e288fa681fd58ebd931fc51c4a4071e6a6a3442fbdc3a63026b7f97db15f63",
        214,
        9,
        6,
    ),
    "vehicle": _pair(
        "vehicle",
        "ba5d0ad4cd501f6ffe8820d69cfbc77ebb6ab585cef1bb1c468e133168f024a3",
        "b38c8cabd2c14f0cfe3dd890949fa9584895f0535f0ca4b481f33dd23d13363f",
        846,
        18,
        4,
    ),
    "waveform": _pair(
        "waveform",
        "6c3550b344b992b470c0dc1c3456e94fc2270f6291d2b0b660f5441652257bd9",
        "94ee5bdf99a1479807ec47bcc70718b912fac7694b94e3a6e8810d8096e2eaa4",
        1000,
        21,
        3,
    ),
    "satellite": _pair(
        "satellite",
        "cdbb80d29a29623a96d5a0847fb1dfe00ba817582ca367392c17e74ff54c37fd",
        "428ae0655dc0963c1e87909e69d4f0e12c5b6b2fd6ee28182c4933f0622bec40",
        6435,
        36,
        6,
    ),
    "digits_uci": _pair(
        "digits",
        "5b547d8a32314e556f0332d34e6a9d33979c53e9c41ba7f120c46c074e1cc3f9",
        "4f842b65207ee4f69989043b53f7d71c0e1a28cde9231bf3b9ea4335e090634d",
        1797,
        64,
        10,
    ),
    "banana": Table(
        "banana",
        {"banana.csv": "4fb6e6ac8748456ab078a7eef75373ba682470722b0c90f2dc907985c0f855f3"},
        (),
        5300,
        2,
        2,
        ",",
    ),
}


@dataclass(frozen=True, kw_only=True)
class UCIClassification:
    """Rows of numbers with one class each. All rows are pooled and split by the seed, stratified by class.

    Immer et al. (2021) split 70/15/15: `test_fraction` 0.15, and `val_fraction` 0.1765 of the rest.
    Files under the data folder: `UCI_Classification/<folder>/`. Labels are numbered from 0 in ascending
    order; `class_names` keeps the original ones.
    """

    name: str
    test_fraction: float
    val_fraction: float
    train_size: int | None
    test_size: int | None
    cites: ClassVar[tuple[str, ...]] = ("immer2021",)

    def spec(self) -> TaskSpec:
        """What is known before reading. Raises `UserError` for invalid values."""
        problems = []
        published = SETS.get(self.name)
        if published is None:
            problems.append(f"data.name must be one of {', '.join(SETS)}; got {self.name}.")
        problems += fraction_problems(self.test_fraction)
        rows = 0 if published is None or problems else published.rows
        raise_all(problems + self._sizes.problems(*(halves_of(rows, self.test_fraction) if rows else (0, 0))))
        assert published is not None
        return TaskSpec(self.name, "classification", (published.features,), published.classes, self.val_fraction)

    @property
    def _sizes(self) -> Sizes:
        return Sizes(self.val_fraction, self.train_size, self.test_size)

    def sources(self) -> Sequence[Source]:
        table = SETS[self.name]
        files = tuple(File(name, checksum=checksum) for name, checksum in table.files.items())
        by_hand = f"Download them by hand from {SOURCE}."
        return (Source(self.name, f"UCI_Classification/{table.folder}", files, by_hand=by_hand),)

    def partner_sources(self) -> Mapping[str, Source]:
        return {}

    def load(self, data_dir: Path, seed: int) -> Task:
        """Read the table. Raises `UserError` if a file is missing or not the published one."""
        spec, table = self.spec(), SETS[self.name]
        (source,) = self.sources()
        x, raw = _read(ensure(source, data_dir), table)
        values, numbered = np.unique(raw, return_inverse=True)
        y = torch.from_numpy(numbered.reshape(-1).astype(np.int64))
        order = seeded_order(len(y), y, generator(seed, "split", self.name))
        num_train, _ = halves_of(len(y), self.test_fraction)
        train, test = order[:num_train].sort().values, order[num_train:].sort().values
        parts = divide(train, test, self._sizes, seed, y[train], y[test])
        names = tuple(f"{value:g}" for value in values)
        notes: tuple[str, ...] = ()
        if names != tuple(str(i) for i in range(len(names))):
            notes = ("labels " + ", ".join(f"{name} is class {i}" for i, name in enumerate(names)),)
        return table_task(spec, torch.from_numpy(x), y, parts, class_names=names, notes=notes)


def _read(folder: Path, table: Table) -> tuple[Array, Array]:
    """Inputs [N, D] and labels [N]."""

    def rows(names: Sequence[str], dimensions: Literal[1, 2]) -> Array:
        return np.concatenate([np.loadtxt(folder / n, delimiter=table.delimiter, ndmin=dimensions) for n in names])

    x = rows([name for name in table.files if name not in table.labels], 2)
    return (x, rows(table.labels, 1)) if table.labels else (x[:, :-1], x[:, -1])
