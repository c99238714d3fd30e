"""What a user's own data sets share: the seeded split, labels numbered from 0, and the content of a file."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from bnn_runner.data.holdout_fraction import halves_of
from bnn_runner.data.splits import Parts, Sizes, divide, seeded_order
from bnn_runner.errors import UserError
from bnn_runner.rng import generator
from bnn_runner.tasks import Task

MOST_CLASSES = 1000
FEW_LABELS = 10
"""Whole numbers with at most this many different values, each five times on average, are read as classes."""
NEED_PATH = "data={choice} requires a file: data.path={example} (relative to the working directory)."


def seeded_parts(rows: int, labels: Tensor | None, test_fraction: float, sizes: Sizes, seed: int) -> Parts:
    """Parts of `rows` points without a given split; stratified if there are `labels` [N]."""
    return given_parts(rows, labels, None, None, test_fraction, sizes, seed)


def given_parts(
    rows: int,
    labels: Tensor | None,
    num_val: int | None,
    num_test: int | None,
    test_fraction: float,
    sizes: Sizes,
    seed: int,
) -> Parts:
    """Parts of points that stand in the order training, validation, test.

    Args:
        rows: number of all points.
        labels: [N], for stratification; None for regression.
        num_val: points of a given validation part; None if `sizes` says how many training points it takes.
        num_test: points of a given test part; None if the seed draws `test_fraction` of the training points.
        test_fraction: likewise.
        sizes: of the parts.
        seed: of what is drawn.
    """
    order = torch.arange(rows)
    num_train = rows - (num_val or 0) - (num_test or 0)
    train = order[:num_train]
    if num_test is None:
        drawn = seeded_order(num_train, None if labels is None else labels[train], generator(seed, "split", "own"))
        kept, _ = halves_of(num_train, test_fraction)
        train, test = drawn[:kept].sort().values, drawn[kept:].sort().values
    else:
        test = order[rows - num_test :]
    held = (None, None) if labels is None else (labels[train], labels[test])
    if num_val is None:
        return divide(train, test, sizes, seed, *held)
    parts = divide(train, test, replace(sizes, val_fraction=0.0), seed, *held)
    return replace(parts, val=order[num_train : num_train + num_val])


def numbered(labels: Sequence[str | float]) -> tuple[Tensor, tuple[str, ...]]:
    """Labels numbered from 0 [N], in ascending order (numbers by size, text alphabetically), and the original ones.

    >>> numbered([3.0, 1.0, 3.0])
    (tensor([1, 0, 1]), ('1', '3'))
    """
    if any(isinstance(label, str) for label in labels):
        names = sorted({str(label) for label in labels})
        places = {name: i for i, name in enumerate(names)}
        return torch.tensor([places[str(label)] for label in labels]), tuple(names)
    values = sorted({float(label) for label in labels})
    index = {value: i for i, value in enumerate(values)}
    found = torch.tensor([index[float(label)] for label in labels])
    return found, tuple(repr(int(v)) if v.is_integer() else repr(v) for v in values)


def looks_like_classes(values: Sequence[float | None]) -> bool:
    """Whether a target is read as labels: only text (None), or whole numbers with few different values."""
    if all(value is None for value in values):
        return True
    if any(value is None or not value.is_integer() for value in values):
        return False
    different = len(set(values))
    return different <= FEW_LABELS and len(values) >= 5 * different


def map_note(names: Sequence[str]) -> tuple[str, ...]:
    """A note that maps labels to classes; none if they are 0, 1, 2, ... already."""
    if list(names) == [str(i) for i in range(len(names))]:
        return ()
    shown = ", ".join(f"{name} is class {i}" for i, name in enumerate(names[:20]))
    return (f"labels: {shown}{' and so on' if len(names) > 20 else ''}",)


def class_problems(names: Sequence[str], where: str, rows: int) -> list[str]:
    """Problems with the labels of a whole set."""
    if len(names) < 2:
        return [f"{where} must have at least 2 different labels; got only {names[0]} in all {rows} rows."]
    if len(names) > MOST_CLASSES or len(names) > max(rows // 2, 2):
        return [
            f"{where} has too many labels for classes: {len(names)} different ones in {rows} rows. Use "
            "data.task=regression to predict a number, or another column as data.target."
        ]
    return []


def check_classes(labels: Tensor, parts: Parts, names: Sequence[str]) -> tuple[str, ...]:
    """Notes on classes that are missing in a part. Raises `UserError` for a training part with one class."""
    counts = torch.bincount(labels[parts.train], minlength=len(names))
    if int((counts > 0).sum()) < 2:
        raise UserError(
            f"The training points must have at least 2 classes; all {len(parts.train)} have the label "
            f"{names[int(counts.argmax())]}. Raise data.train_size, lower data.test_fraction, or use another seed."
        )
    notes = [f"class {names[i]} has no training points" for i in (counts == 0).nonzero().flatten().tolist()]
    for name, rows in (("validation", parts.val), ("test", parts.test)):
        if len(rows) and len(labels[rows].unique()) == 1:
            notes.append(f"the {name} part has only one class, {names[int(labels[rows[0]])]}")
    return tuple(notes)


def content_of(digests: Iterable[bytes]) -> str:
    """A hash of several files, from theirs in order."""
    digest = hashlib.blake2b(digest_size=16)
    for part in digests:
        digest.update(part)
    return digest.hexdigest()


def with_content(task: Task, path: Path) -> Task:
    """The task with a hash of the file in its fingerprint: any change of the file changes the key of its networks."""
    digest = hashlib.blake2b(task.fingerprint.encode(), digest_size=16)
    with path.open("rb") as file:
        content = hashlib.file_digest(file, "sha256")
    digest.update(content.digest())
    return replace(task, fingerprint=digest.hexdigest(), content=content.hexdigest())
