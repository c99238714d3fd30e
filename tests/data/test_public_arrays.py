"""Arrays as people save them: other names, one-hot labels, labels as decimals, a validation part."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from bnn_runner.data.user_arrays import OwnArrays
from bnn_runner.errors import UserError

N = 60
RANDOM = np.random.default_rng(0)
X = RANDOM.normal(size=(N, 3))
CLASSES = np.arange(N) % 3
HOT = np.eye(3)[CLASSES]
PIXELS = RANDOM.integers(0, 256, size=(N, 8, 8, 3)).astype(np.uint8)
PARTS = {"train": slice(0, 40), "val": slice(40, 48), "test": slice(48, 60)}


def in_parts(x: str, y: str, *parts: str) -> dict[str, Any]:
    """Arrays by parts; the names have the part at {}."""
    return {x.format(p): X[PARTS[p]] for p in parts} | {y.format(p): CLASSES[PARTS[p]] for p in parts}


def own(path: Path, **changes: Any) -> OwnArrays:
    fields: dict[str, Any] = {"task": "auto", "test_fraction": 0.2, "val_fraction": 0.1}
    return OwnArrays(path=path, **(fields | {"train_size": None, "test_size": None} | changes))


# Arrays, settings, then: kind, outputs, sizes of the parts (None: drawn), and what is said.
SPLIT = (43, 5, 12)
READ: dict[str, tuple[dict[str, Any], dict[str, Any], str, int, tuple[int, int, int], str]] = {
    "plain": ({"x": X, "y": CLASSES}, {}, "classification", 3, SPLIT, "x ([60, 3], float64) is read as vectors of 3"),
    "capitals": ({"X": X, "Y": CLASSES}, {}, "classification", 3, SPLIT, "X is read as x, Y is read as y"),
    "scikit-learn's names": (
        {"data": X, "target": CLASSES, "feature_names": np.array(["a", "b", "c"])},
        {},
        "classification",
        3,
        SPLIT,
        "data is read as x, target is read as y",
    ),
    "images and labels": ({"images": PIXELS, "labels": CLASSES}, {}, "classification", 3, SPLIT, "images [N, H, W, C]"),
    "positions": ({"arr_0": X, "arr_1": CLASSES}, {}, "classification", 3, SPLIT, "arr_0 is read as x"),
    "Keras' names": (
        in_parts("x_{}", "y_{}", "train", "test"),
        {},
        "classification",
        3,
        (36, 4, 12),
        "parts: train, test",
    ),
    "MedMNIST's names": (
        in_parts("{}_images", "{}_labels", "train", "val", "test"),
        {},
        "classification",
        3,
        (40, 8, 12),
        "train_images is read as x_train",
    ),
    "no test part": (
        in_parts("X_{}", "y_{}", "train", "val"),
        {},
        "classification",
        3,
        (32, 8, 8),
        "the seed draws the test part from train",
    ),
    "training part alone": (
        in_parts("Xtrain", "ytrain", "train"),
        {},
        "classification",
        3,
        (29, 3, 8),
        "the seed draws the validation and the test part from train",
    ),
    "one-hot": ({"x": X, "y": HOT}, {}, "classification", 3, SPLIT, "y (float64) is read as 3 classes, one-hot"),
    "one-hot, whole numbers": (
        {"x": X, "y": HOT.astype(int)},
        {},
        "classification",
        3,
        SPLIT,
        "one-hot; data.task=regression",
    ),
    "one-hot, true and false": ({"x": X, "y": HOT > 0}, {}, "classification", 3, SPLIT, "one-hot"),
    "one-hot as said": (
        {"x": X, "y": HOT},
        {"task": "classification"},
        "classification",
        3,
        SPLIT,
        "first point: class 0",
    ),
    "one-hot as numbers": (
        {"x": X, "y": HOT},
        {"task": "regression"},
        "regression",
        3,
        SPLIT,
        "first point: y = 1, 0, 0",
    ),
    "labels as decimals": (
        {"x": X, "y": CLASSES.astype(float)},
        {},
        "classification",
        3,
        SPLIT,
        "y (float64) is read as classes",
    ),
    "decimals": ({"x": X, "y": X[:, 0]}, {}, "regression", 1, SPLIT, "read as numbers; data.task=classification"),
    "bytes in latin-1": (
        {"x": X, "y": np.array(["süß".encode("latin-1"), b"salzig"])[CLASSES % 2]},
        {},
        "classification",
        2,
        SPLIT,
        "salzig is class 0, süß is class 1",
    ),
}


@pytest.mark.parametrize("case", READ)
def test_what_is_read_and_said(case: str, tmp_path: Path) -> None:
    arrays, fields, kind, outputs, sizes, note = READ[case]
    np.savez(tmp_path / "mine.npz", **arrays)
    data = own(tmp_path / "mine.npz", **fields)
    task = data.load(Path("/nonexistent"), 0)
    assert task.spec == data.spec()
    assert (task.spec.kind, task.spec.num_outputs) == (kind, outputs)
    assert tuple(len(s) for s in (task.train, task.val, task.test)) == sizes
    assert note in "\n".join(task.notes), task.notes
    assert "is read as" in "\n".join(task.notes)
    if kind == "classification" and outputs == 3:
        assert task.train.targets is not None
        assert torch.equal(task.train.targets, torch.from_numpy(CLASSES)[task.train.ids])


REFUSED: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    "other names": ({"u": X, "v": CLASSES}, {}, r"must contain either x and y .*got u \[60, 3\], v \[60\]. Write them"),
    "two inputs": ({"images": PIXELS, "data": X, "y": CLASSES}, {}, "images and data may both be x. Choose with"),
    "targets of one part": ({"x_train": X, "y_train": CLASSES, "x_test": X}, {}, "must contain either x and y"),
    "probabilities": (
        {"x": X, "y": np.full((N, 3), 1 / 3) + HOT},
        {"task": "classification"},
        r"one-hot, \[N, K\]; got \[60, 3\]. If the largest entry of a row is its class",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_refused_says_what_to_run(case: str, tmp_path: Path) -> None:
    """The printed line writes another file, which is read."""
    arrays, fields, message = REFUSED[case]
    np.savez(tmp_path / "mine.npz", **arrays)
    with pytest.raises(UserError, match=message) as caught:
        own(tmp_path / "mine.npz", **fields).load(Path(), 0)
    [line] = re.findall(r"python -c .*", str(caught.value))
    if case in ("other names", "probabilities"):
        subprocess.run(["bash", "-c", line.replace("python", sys.executable, 1)], check=True)
        task = own(tmp_path / "mine_2.npz", **fields).load(Path(), 0)
        assert task.spec.num_outputs == 3 and task.class_names == ("0", "1", "2")


def test_other_files_are_named(tmp_path: Path) -> None:
    (tmp_path / "mine.csv").write_text("a,y\n1,2\n")
    with pytest.raises(UserError, match="For a table, use data=csv"):
        own(tmp_path / "mine.csv").spec()
    np.savez(tmp_path / "mine.npz", x=X, y=np.array(["a", "b"], dtype=object)[CLASSES % 2])
    with pytest.raises(UserError, match=r"labels of type object as y.astype\(str\)"):
        own(tmp_path / "mine.npz").spec()
