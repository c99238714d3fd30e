"""Folders of images as people have them: splits of any name, deep images, copies, damaged and unread files."""

from __future__ import annotations

import io
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from bnn_runner.data.image_folder import ImageFolder
from bnn_runner.errors import UserError
from bnn_runner.runs.new_images import read_images
from bnn_runner.tasks import AsStored, Split, Task, TaskSpec

FIELDS: dict[str, Any] = {"size": 4, "channels": 3, "workers": 2, "test_fraction": 0.25, "val_fraction": 0.1}
FIELDS |= {"train_size": None, "test_size": None}


def encoded(pixels: Any, suffix: str = ".png") -> bytes:
    """An image file of [H, W] or [H, W, 3] values."""
    out = io.BytesIO()
    Image.fromarray(pixels).save(out, {".png": "PNG", ".tif": "TIFF"}.get(suffix, "JPEG"))
    return out.getvalue()


_serial = iter(range(10**9))


def picture(shade: int = 100) -> bytes:
    """A small image whose bytes no other one has."""
    n = next(_serial)
    return encoded(np.full((6, 6, 3), (n % 256, n // 256 % 256, shade), np.uint8))


def fill(root: Path, *folders: str, count: int = 10) -> None:
    for number, folder in enumerate(folders):
        (root / folder).mkdir(parents=True, exist_ok=True)
        for n in range(count):
            (root / folder / f"{n:03}.png").write_bytes(picture(40 * (number % 5)))


def deep(root: Path, kind: str) -> None:
    """Three classes that differ by their level, in 16 bits or in fractions."""
    levels = {"16 bits": (1000, 30000, 60000), "12 bits": (100, 2000, 4000), "fractions": (0.1, 0.5, 0.9)}[kind]
    for name, level in zip("abc", levels, strict=True):
        (root / name).mkdir(parents=True)
        for n in range(12):
            if kind == "fractions":
                data = encoded(np.full((6, 6), level + n / 1000, np.float32), ".tif")
            else:
                data = encoded(np.full((6, 6), level + n, np.uint16))
            (root / name / f"{n}{'.tif' if kind == 'fractions' else '.png'}").write_bytes(data)


def checkpoints(root: Path) -> None:
    fill(root, "cat", "dog")
    for name in ("cat", "dog"):
        (root / name / ".ipynb_checkpoints").mkdir()
        for n in range(5):
            copy = (root / name / f"{n:03}.png").read_bytes()
            (root / name / ".ipynb_checkpoints" / f"{n:03}-checkpoint.png").write_bytes(copy)
            (root / name / f"._{n:03}.png").write_bytes(b"Mac OS X")
    (root / ".ipynb_checkpoints").mkdir()
    (root / "__MACOSX" / "cat").mkdir(parents=True)


def loose_checkpoints(root: Path) -> None:
    fill(root, "cat", "dog")
    for n in range(4):
        (root / "cat" / f"{n:03}-checkpoint.png").write_bytes((root / "cat" / f"{n:03}.png").read_bytes())


def suffixes(root: Path) -> None:
    fill(root, "cat", "dog")
    for n in range(4):
        (root / "cat" / f"x{n}.jfif").write_bytes(encoded(np.full((6, 6, 3), 9 * n, np.uint8), ".jfif"))
        (root / "dog" / f"x{n}.HEIC").write_bytes(b"ftypheic")
    (root / "dog" / "labels.txt").write_text("x")
    (root / "dog" / "Thumbs.db").write_bytes(b"x")


def copies(root: Path) -> None:
    fill(root, "train/cat", "train/dog", "test/cat", "test/dog")
    for n in range(3):
        (root / "test/cat" / f"{n:03}.png").write_bytes((root / "train/cat" / f"{n:03}.png").read_bytes())


def unlabelled(root: Path) -> None:
    fill(root, "train/cat", "train/dog")
    fill(root, "test")


def moving(root: Path) -> None:
    fill(root, "cat", "dog")
    frames = [Image.new("RGB", (6, 6), (80 * n, 0, 9)) for n in range(3)]
    frames[0].save(root / "cat" / "run.gif", save_all=True, append_images=frames[1:])


@dataclass
class Case:
    """What is written, and what is read: sizes of train, val and test, classes, and what is said."""

    make: Callable[[Path], None]
    sizes: tuple[int, int, int]
    notes: str | list[str]
    classes: tuple[str, ...] = ("cat", "dog")
    fields: dict[str, Any] = field(default_factory=dict)


def parts(*names: str) -> Callable[[Path], None]:
    return lambda root: fill(root, *(f"{name}/{pet}" for name in names for pet in ("cat", "dog")))


BOTH = (18, 2, 20)
READ = {
    "classes": Case(
        lambda r: fill(r, "cat", "dog"),
        (13, 2, 5),
        ["classes are the folders of pictures: cat, dog", "cat/000.png (RGB, 6 x 6), class cat"],
    ),
    "train, test": Case(
        parts("train", "test"),
        BOTH,
        "train/ is the training part, test/ is the test part, the seed draws the validation part",
    ),
    "Training, Testing": Case(
        parts("Training", "Testing"), BOTH, "Training/ is the training part, Testing/ is the test part"
    ),
    "training_set, test_set": Case(parts("training_set", "test_set"), BOTH, "training_set/ is the training part"),
    "TRAIN, TEST": Case(parts("TRAIN", "TEST"), BOTH, "TRAIN/ is the training part"),
    "train_images, test_images": Case(parts("train_images", "test_images"), BOTH, "test_images/ is the test part"),
    "trainset, testset": Case(parts("trainset", "testset"), BOTH, "testset/ is the test part"),
    "seg_train in seg_train": Case(
        parts("seg_train/seg_train", "seg_test/seg_test"),
        BOTH,
        ["seg_train/ is the training part", "read inside seg_train/seg_train"],
    ),
    "train, val, test": Case(
        parts("train", "val", "test"), (20, 20, 20), "val/ is the validation part, test/ is the test part"
    ),
    "train, valid, test": Case(parts("train", "valid", "test"), (20, 20, 20), "valid/ is the validation part"),
    "train, val": Case(
        parts("train", "val"), (15, 20, 5), "val/ is the validation part, the seed draws the test part from train/"
    ),
    "Train, Validation, fewer": Case(
        parts("Train", "Validation"), (10, 20, 5), "Validation/ is the validation part", fields={"train_size": 10}
    ),
    "train alone": Case(parts("train"), (13, 2, 5), "the seed draws the validation and the test part from train/"),
    "one folder around": Case(
        lambda r: fill(r, "pets/cat", "pets/dog"), (13, 2, 5), "read inside pictures/pets, the only folder there"
    ),
    "a test part without labels": Case(unlabelled, (13, 2, 5), "test/ has images without classes: not used"),
    "vehicles, one of them a train": Case(
        lambda r: fill(r, "bus", "train", "tram"), (20, 2, 8), "classes are the folders", ("bus", "train", "tram")
    ),
    "classes with folders": Case(lambda r: fill(r, "cat/indoors", "cat/outdoors", "dog"), (20, 2, 8), "classes are"),
    "copies of Jupyter": Case(checkpoints, (13, 2, 5), "left out: 20 hidden files and copies in hidden folders"),
    "copies of Jupyter beside": Case(loose_checkpoints, (13, 2, 5), "left out: 4 hidden files"),
    "other suffixes": Case(
        suffixes, (16, 2, 6), "left out: 5 files that are not read as images (4 .heic, 1 .txt); read: 4 .jfif, 20 .png"
    ),
    "copies in the test part": Case(copies, BOTH, "3 test images are copies of training images, such as 000.png"),
    "moving pictures": Case(moving, (14, 2, 5), "1 files have several pictures: the first of each is read"),
}


@pytest.mark.parametrize("name", READ)
def test_what_is_read_and_said(name: str, tmp_path: Path) -> None:
    case = READ[name]
    root = tmp_path / "pictures"
    case.make(root)
    data = ImageFolder(path=str(root), **(FIELDS | case.fields))
    task = data.load(Path(), 0)
    printed = "\n".join(task.notes)
    for note in [case.notes] if isinstance(case.notes, str) else case.notes:
        assert note in printed, printed
    assert task.class_names == case.classes and task.spec == data.spec()
    assert tuple(len(s) for s in (task.train, task.val, task.test)) == case.sizes
    if case.sizes == (20, 20, 20):
        folders = [{p.parts[-3] for p in s.inputs.paths} for s in (task.train, task.val, task.test)]
        assert folders[0] == {"train"} and folders[1] < {"val", "valid"} and folders[2] == {"test"}


@pytest.mark.parametrize(("kind", "white"), [("16 bits", "65535"), ("12 bits", "4095"), ("fractions", "1")])
def test_deep_images_keep_their_levels(kind: str, white: str, tmp_path: Path) -> None:
    """Planted bug: Pillow's conversion to 8 bits, which makes all of them white."""
    deep(tmp_path, kind)
    task = ImageFolder(path=str(tmp_path), **FIELDS | {"channels": 1}).load(Path(), 0)
    assert f"0 is read as black and {white} as white" in "\n".join(task.notes)
    pixels = task.train.inputs.read(torch.arange(len(task.train)))[:, 0, 0, 0].double()
    levels = [pixels[task.train.targets == k].mean().item() for k in range(3)]
    expected = {"16 bits": (4, 117, 233), "12 bits": (6, 125, 249), "fractions": (27, 129, 231)}[kind]
    np.testing.assert_allclose(levels, expected, atol=1.5)
    new = read_images(tmp_path, task)
    assert len(new.points) == 36 and torch.equal(
        new.points.inputs[:12, 0, 0, 0].unique().sort().values[:1], new.points.inputs[0, 0, 0, :1]
    )


def deep_with(value: float, kind: Any) -> Callable[[Path], None]:
    def make(root: Path) -> None:
        fill(root, "cat", "dog")
        mode = ".png" if kind is np.uint16 else ".tif"
        (root / "cat" / f"odd{mode}").write_bytes(encoded(np.full((6, 6), value, kind), mode))

    return make


def damaged(root: Path) -> None:
    fill(root, "train/cat", "train/dog", "test/cat", "test/dog")
    (root / "test/cat/000.png").write_bytes(b"")
    whole = (root / "train/dog/001.png").read_bytes()
    (root / "train/dog/001.png").write_bytes(whole[: len(whole) // 2])
    (root / "train/dog/002.png").write_text("version https://git-lfs.github.com/spec/v1\noid 1\n")


def cut_jpeg(root: Path) -> None:
    fill(root, "cat", "dog")
    noise = np.random.default_rng(0).integers(0, 255, (64, 64, 3)).astype(np.uint8)
    (root / "dog" / "cut.jpg").write_bytes(encoded(noise, ".jpg")[:-900])


REFUSED: dict[str, tuple[Callable[[Path], None], str]] = {
    "equal folders in all classes": (
        lambda r: fill(r, "2019/cat", "2019/dog", "2020/cat", "2020/dog"),
        r"has the folders 2019, 2020, and each of them has the folders cat, dog. If cat, dog are the classes",
    ),
    "two folders of one split": (parts("train", "training"), "one folder for each split; got train, training"),
    "no training part": (parts("val", "test"), "must have a folder train/ next to test/ and val/"),
    "damaged files, all at once": (
        damaged,
        r"Could not read 3 of 40 images: .*001.png .*, .*002.png .*git lfs pull.*, .*000.png .the file is empty",
    ),
    "a cut JPEG": (cut_jpeg, r"Could not read .*cut.jpg .*truncated"),
    "negative fractions": (deep_with(-0.5, np.float32), "must have values from 0 to 65535, or from 0 to 1; got -0.5"),
    "not a number": (deep_with(np.nan, np.float32), "must have values from 0 to 65535"),
    "more than 16 bits": (deep_with(70000, np.int32), "must have values from 0 to 65535, or from 0 to 1; got 70000"),
    "a class in another case": (
        lambda r: fill(r, "train/cat", "train/dog", "test/Cat", "test/dog"),
        r"Cat must be a class .* Did you mean cat\?",
    ),
    "images without classes": (lambda r: fill(r, "."), "must have at least 2 folders"),
    "only unread files": (
        lambda r: ([(r / n).mkdir(parents=True) for n in "ab"], [(r / n / "x.heic").write_bytes(b"x") for n in "ab"])[
            0
        ],
        "a has no images",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_refused(name: str, tmp_path: Path) -> None:
    make, message = REFUSED[name]
    make(tmp_path / "pictures")
    with pytest.raises(UserError, match=message):
        ImageFolder(path=str(tmp_path / "pictures"), **FIELDS).load(Path(), 0)


def test_new_images_that_are_not_readable_are_marked(tmp_path: Path) -> None:
    fill(tmp_path / "new", ".", count=3)
    (tmp_path / "new/001.png").write_bytes(b"")
    (tmp_path / "new/.ipynb_checkpoints").mkdir()
    (tmp_path / "new/.ipynb_checkpoints/000-checkpoint.png").write_bytes(picture())
    empty = Split(torch.empty(0, 3, 6, 6, dtype=torch.uint8), None, torch.arange(0), AsStored())
    spec = TaskSpec("photos", "classification", (3, 6, 6), 2, 0.1)
    task = Task(spec, empty, empty, empty, {}, "", torch.zeros(2), torch.ones(2))
    new = read_images(tmp_path / "new", task)
    assert new.labels == ("000.png", "001.png", "002.png") and list(new.misfits) == [1] and len(new.points) == 2
    assert "1 of 3 images not predicted" in new.notes[0]
