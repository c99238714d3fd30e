"""Images in folders: classes, parts, decoding batch by batch, and errors for invalid files and folders."""

from __future__ import annotations

import io
import threading
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from bnn_runner.data import image_files
from bnn_runner.data.image_files import ImageFiles, decode
from bnn_runner.data.image_folder import ImageFolder
from bnn_runner.errors import UserError
from bnn_runner.experiment import load_experiment
from bnn_runner.runner import run
from bnn_runner.runtime.console import Console

FIELDS = {"size": 8, "channels": 3, "workers": 2, "test_fraction": 0.25, "val_fraction": 0.1}
FIELDS |= {"train_size": None, "test_size": None}


def write(folder: Path, count: int, shade: int = 100, size: tuple[int, int] = (8, 8)) -> None:
    """PNG files, image n of one colour (n, shade, 7): what is read says which file it was."""
    folder.mkdir(parents=True)
    for n in range(count):
        Image.new("RGB", size, (n, shade, 7)).save(folder / f"{n:03}.png")


@pytest.fixture
def pictures(tmp_path: Path) -> Path:
    root = tmp_path / "pictures"
    write(root / "dog", 40, 200)
    write(root / "cat", 40, 50)
    write(root / "ood" / "noise", 5)
    return root


def data(root: Path, **changes) -> ImageFolder:
    return ImageFolder(path=str(root), **FIELDS | changes)


def test_classes_parts_and_pixels(pictures: Path) -> None:
    """Planted bugs: labels in the order of a directory listing; rows of one part read for another; ood as a class."""
    task = data(pictures).load(Path(), 0)
    assert task.spec.input_shape == (3, 8, 8) and task.class_names == ("cat", "dog")
    assert "labels: cat is class 0, dog is class 1" in task.notes
    assert [len(s) for s in (task.train, task.val, task.test)] == [54, 6, 20] and len(task.ood["noise"]) == 5
    for split in (task.train, task.val, task.test):
        assert not isinstance(split.inputs, torch.Tensor)
        pixels = split.inputs.read(torch.arange(len(split)))
        assert pixels.dtype == torch.uint8 and torch.equal(pixels[:, 0, 3, 4].long(), split.ids % 40)
        assert torch.equal(pixels[:, 1, 0, 0] > 100, split.targets == 1)
    x, y = task.train.gather(torch.tensor([[3, 5], [5, 0]]))
    assert x.shape == (2, 2, 3, 8, 8) and torch.equal(x[0, 1], x[1, 0]) and y.shape == (2, 2)
    few = task.train.subset(torch.tensor([5, 3]))
    torch.testing.assert_close(few.gather(torch.arange(2))[0], x[0].flip(0))
    both = task.train.inputs.joined([task.val.inputs])
    assert torch.equal(both.read(torch.tensor([54]))[0], task.val.inputs.read(torch.tensor([0]))[0])


def test_folders_of_train_and_test_are_kept(tmp_path: Path) -> None:
    for part, count in (("train", 12), ("test", 4)):
        for name in ("a", "b"):
            write(tmp_path / part / name, count)
    task = data(tmp_path).load(Path(), 0)
    assert [len(s) for s in (task.train, task.val, task.test)] == [22, 2, 8]
    assert task.test.ids.min() == 24
    write(tmp_path / "test" / "c", 2)
    with pytest.raises(UserError, match=r"c must be a class of the training images"):
        data(tmp_path).spec()


def test_batches_hold_only_what_is_needed_and_come_ahead(pictures: Path, monkeypatch) -> None:
    """Planted bugs: all images decoded at once; a batch announced and then decoded a second time; order lost."""
    seen: list[str] = []
    lock = threading.Lock()

    def counting(path: Path, size: int, channels: int, white: float | None) -> torch.Tensor:
        with lock:
            seen.append(path.name)
        return decode(path, size, channels, white)

    monkeypatch.setattr(image_files, "decode", counting)
    task = data(pictures).load(Path(), 0)
    assert seen == []
    stream = task.train.batches(10)
    first, _ = next(stream)
    assert 10 <= len(seen) <= 20  # this batch, and at most the next
    rest = [x for x, _ in stream]
    assert len(seen) == len(task.train)
    direct = replace(task.train, inputs=ImageFiles(task.train.inputs.paths, 8, 3, workers=0))
    assert torch.equal(torch.cat([first, *rest]), torch.cat([x for x, _ in direct.batches(7)]))
    for start in range(5):  # announced and never asked for: two are held
        task.train.ahead(torch.arange(start, start + 3))
    assert len(task.train.inputs._coming) == 2


def test_images_of_any_size_and_mode_are_brought_to_one(tmp_path: Path) -> None:
    """Planted bugs: a stretched picture; grey, palette or transparent images refused; a camera's turn ignored."""
    wide = np.zeros((20, 40, 3), np.uint8)
    wide[:, 10:30] = 255  # the middle square is white
    for mode in ("RGB", "L", "P", "RGBA", "1"):
        path = tmp_path / f"{mode}.png"
        Image.fromarray(wide).convert(mode).save(path)
        read = decode(path, 10, 3)  # the filter reaches a little beyond the cut
        assert read.shape == (3, 10, 10) and bool((read[..., 1:-1] > 250).all()) and bool((read > 200).all()), mode
        assert decode(path, 10, 1).shape == (1, 10, 10)
    upright = np.zeros((8, 8, 3), np.uint8)
    upright[:4] = 255
    exif = Image.Exif()
    exif[0x0112] = 3  # the camera was upside down
    Image.fromarray(upright).save(tmp_path / "turned.jpg", exif=exif, quality=95)
    turned = decode(tmp_path / "turned.jpg", 8, 1)[0].float()
    assert turned[:3].mean() < 20 and turned[5:].mean() > 235


def test_a_damaged_file_is_named(pictures: Path) -> None:
    bad = pictures / "cat" / "007.png"
    good = bad.read_bytes()
    for content in (good[: len(good) // 2], b"no image"):
        bad.write_bytes(content)
        for workers in (0, 2):
            with pytest.raises(UserError, match=r"Could not read .*cat/007\.png .* as an image, one of 85"):
                data(pictures, workers=workers).load(Path(), 0)
    bad.write_bytes(good)
    task = data(pictures).load(Path(), 0)
    bad.write_bytes(good[: len(good) // 2])  # damaged after it was checked
    with pytest.raises(UserError, match=r"Could not read .*cat/007\.png as an image"):
        for split in (task.train, task.val, task.test):
            list(split.batches(16))


def test_the_fingerprint_follows_content_and_size(pictures: Path) -> None:
    """Planted bug: a stale network after an image was replaced."""
    base = data(pictures).load(Path(), 0).fingerprint
    assert data(pictures, workers=0).load(Path(), 0).fingerprint == base
    assert data(pictures, size=9).load(Path(), 0).fingerprint != base
    task = data(pictures).load(Path(), 0)
    used = task.train.inputs.paths[0]
    Image.new("RGB", (8, 8), (255, 0, 255)).save(used)
    assert data(pictures).load(Path(), 0).fingerprint != base


def test_one_pixel_in_the_middle_of_a_large_plain_image_counts(pictures: Path) -> None:
    """Planted bug: a digest of both ends of a file, which BMP files of equal length can share."""
    image = Image.new("RGB", (100, 100), (1, 2, 3))
    for n in range(2):
        image.save(pictures / "cat" / f"{n:03}.bmp")
    task = data(pictures).load(Path(), 0)
    assert any(path.suffix == ".bmp" for path in task.train.inputs.paths)
    image.putpixel((50, 50), (9, 9, 9))
    for n in range(2):
        image.save(pictures / "cat" / f"{n:03}.bmp")
    assert data(pictures).load(Path(), 0).fingerprint != task.fingerprint


@pytest.mark.parametrize("case", ["no path", "no folder", "one class", "empty class", "test alone", "values"])
def test_invalid_folders_are_reported(pictures: Path, tmp_path: Path, case: str) -> None:
    made, said = data(pictures), ""
    if case == "no path":
        made, said = replace(made, path=None), "requires a folder"
    if case == "no folder":
        made, said = data(tmp_path / "absent"), "is not a folder"
    if case == "one class":
        write(tmp_path / "one" / "a", 3)
        made, said = data(tmp_path / "one"), "got 1"
    if case == "empty class":
        (pictures / "bird").mkdir()
        said = "bird has no images"
    if case == "test alone":
        write(tmp_path / "half" / "test" / "a", 3)
        made, said = data(tmp_path / "half"), r"must have a folder train/ next to test/"
    if case == "values":
        made = data(pictures, size=0, channels=2, workers=-1, test_fraction=1.0)
        with pytest.raises(UserError) as caught:
            made.spec()
        assert len(caught.value.problems) == 4
        return
    with pytest.raises(UserError, match=said):
        made.spec()


def test_a_run_from_files_to_scores(pictures: Path, tmp_path: Path) -> None:
    """Planted bugs: a part of the program that wants all inputs in memory; several lanes that do not fit together."""
    printed = io.StringIO()
    words = [f"data.path={pictures}", f"output_dir={tmp_path / 'out'}", "data=image_folder", "data.size=8"]
    words += ["model=mlp", "model.hidden=[6]", "schedule.epochs=2", "eval.num_draws=4", "threads=1", "replicates=2"]
    words += ["figures=false", "metric=[accuracy,ood]", "time_limit=null", "hyper=fixed", "method=laplace_last_layer"]
    outcome = run(load_experiment(words), Console(printed))
    assert outcome.status == "done", printed.getvalue()
    assert all((cell / "metrics.csv").is_file() for cell in outcome.cells) and len(outcome.cells) == 2
