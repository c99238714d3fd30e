"""Published image sets: bytes are kept, pixels standardised by batch, missing partners reported and never raised."""

from __future__ import annotations

import gzip
import pickle
import struct
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from bnn_runner.data import image_sets
from bnn_runner.data.image_datasets import PublishedImages
from bnn_runner.data.image_sets import SETS, read_idx
from bnn_runner.data.image_sources import IDX_LENGTHS
from bnn_runner.data.images import PixelScaling
from bnn_runner.data.sources import File
from bnn_runner.errors import UserError

ALL = {"val_fraction": 0.1, "train_size": None, "test_size": None, "shifts": ()}
MNIST = PublishedImages(name="mnist", **ALL)


def write_idx(folder: Path) -> None:
    """Files that look like MNIST's: image n is filled with n mod 251, its class is n mod 10."""
    folder.mkdir(parents=True)
    for part, count in (("train", 60_000), ("t10k", 10_000)):
        images = np.broadcast_to((np.arange(count) % 251).astype(np.uint8)[:, None], (count, 784))
        header = struct.pack(">4I", 2051, count, 28, 28)
        (folder / f"{part}-images-idx3-ubyte").write_bytes(header + images.tobytes())
        labels = (np.arange(count) % 10).astype(np.uint8)
        (folder / f"{part}-labels-idx1-ubyte").write_bytes(struct.pack(">2I", 2049, count) + labels.tobytes())


@pytest.fixture(autouse=True)
def no_download(monkeypatch):
    monkeypatch.setenv("BNN_DATA_URL", "file:///nonexistent")


@pytest.fixture
def lenient(monkeypatch):
    """Made-up files stand for MNIST: lengths are compared, sums are not; nothing is looked for in system folders."""
    for name in ("mnist", "fashion_mnist"):
        source = SETS[name].source
        source = replace(source, files=tuple(replace(f, checksum="") for f in source.files), elsewhere=())
        monkeypatch.setitem(image_sets.SETS, name, replace(SETS[name], source=source))


@pytest.fixture(scope="module")
def fake_mnist(tmp_path_factory):
    root = tmp_path_factory.mktemp("images")
    write_idx(root / "MNIST" / "raw")
    return root


def test_mnist_keeps_bytes_and_standardises_by_batch(fake_mnist, lenient):
    task = MNIST.load(fake_mnist, 0)
    assert (len(task.train), len(task.val), len(task.test)) == (54_000, 6_000, 10_000)
    assert task.train.inputs.dtype == torch.uint8
    assert torch.equal(task.train.inputs[:, 0, 5, 5].long(), task.train.ids % 251)
    assert torch.equal(task.test.inputs[:, 0, 5, 5].long(), (task.test.ids - 60_000) % 251)
    assert torch.equal(task.val.targets, task.val.ids % 10)
    assert torch.bincount(task.val.targets).tolist() == [600] * 10
    x, _ = task.train.gather(torch.tensor([[3], [7]]))
    assert x.shape == (2, 1, 1, 28, 28)
    raw = task.train.inputs[3].double()
    torch.testing.assert_close(x[0, 0].double(), (raw / 255 - 0.1307) / 0.3081, atol=1e-5, rtol=0)
    assert task.train.inputs.max() == 250  # `prepare` left what is stored as it was
    moved = task.to(torch.device("cpu"), torch.float64)
    assert moved.train.inputs.dtype == torch.uint8 and moved.train.gather(torch.tensor([0]))[0].dtype == torch.float64


def test_absent_and_damaged_partners_are_reported_not_raised(fake_mnist, lenient):
    small = replace(MNIST, train_size=50, test_size=20)
    task = small.load(fake_mnist, 0)
    assert not task.ood and set(task.unavailable) == {"notmnist", "fashion_mnist", "kmnist"}
    assert "notMNIST_test.npz" in task.unavailable["notmnist"]
    npz, fashion = fake_mnist / "notMNIST_test.npz", fake_mnist / "FashionMNIST" / "raw"
    npz.write_bytes(b"not an archive")
    fashion.parent.mkdir()
    fashion.symlink_to(fake_mnist / "MNIST" / "raw")
    try:
        task = small.load(fake_mnist, 0)
        assert set(task.unavailable) == {"notmnist", "kmnist"}
        assert "Could not read" in task.unavailable["notmnist"]
        assert len(task.ood["fashion_mnist"]) == 10_000
        np.savez(npz, test_images=np.zeros((7, 32, 32), np.uint8))
        assert "[1, 32, 32]" in small.load(fake_mnist, 0).unavailable["notmnist"]
        np.savez(npz, test_images=np.zeros((7, 28, 28), np.uint8))
        task = small.load(fake_mnist, 0)
        assert set(task.unavailable) == {"kmnist"}
        assert task.ood["notmnist"].gather(torch.tensor([0]))[0].shape == (1, 1, 28, 28)
    finally:
        npz.unlink()
        fashion.unlink()
        fashion.parent.rmdir()


def test_a_folder_of_the_system_serves_packed_files(fake_mnist, monkeypatch, tmp_path):
    """Planted bug: Debian's packed Fashion-MNIST overlooked, or preferred to the user's own files."""
    packed = tmp_path / "system"
    packed.mkdir()
    for name in IDX_LENGTHS:
        data = (fake_mnist / "MNIST" / "raw" / name).read_bytes()
        (packed / f"{name}.gz").write_bytes(gzip.compress(data, compresslevel=1))
    fashion = SETS["fashion_mnist"]
    monkeypatch.setitem(SETS, "fashion_mnist", replace(fashion, source=replace(fashion.source, elsewhere=(packed,))))
    task = PublishedImages(name="fashion_mnist", **ALL).load(tmp_path / "none", 0)
    assert len(task.train) == 54_000 and torch.equal(task.val.targets, task.val.ids % 10)
    assert not (tmp_path / "none").exists()
    (packed / "t10k-labels-idx1-ubyte.gz").write_bytes(b"\x1f\x8b")
    with pytest.raises(UserError, match=r"t10k-labels-idx1-ubyte\.gz is damaged"):
        PublishedImages(name="fashion_mnist", **ALL).load(tmp_path / "none", 0)


def test_cifar_batches_are_read_in_their_order(tmp_path):
    """Planted bug: colour planes taken for rows of pixels; training batches in the order of a directory listing."""
    names = [*(f"data_batch_{i}" for i in range(1, 6)), "test_batch"]
    rng = np.random.default_rng(0)
    batches = {name: rng.integers(0, 256, (2, 3072), dtype=np.uint8) for name in names}
    for i, (name, data) in enumerate(batches.items()):
        (tmp_path / name).write_bytes(pickle.dumps({"data": data, "labels": [i, i]}, protocol=2))
    train, test = (SETS["cifar10"].read(tmp_path, part) for part in ("train", "test"))
    assert train.classes.tolist() == [0, 0, 1, 1, 2, 2, 3, 3, 4, 4] and test.classes.tolist() == [5, 5]
    # Red, green, blue planes of 1,024 bytes each, row by row.
    assert (
        test.pixels.shape == (2, 32, 32, 3) and test.pixels[1, 4, 7, 2] == batches["test_batch"][1, 2048 + 4 * 32 + 7]
    )


def test_an_idx_file_of_another_kind_is_refused(tmp_path):
    (tmp_path / "t10k-images-idx3-ubyte").write_bytes(b"PK\x03\x04 something else")
    (tmp_path / "t10k-labels-idx1-ubyte").write_bytes(struct.pack(">2I", 2049, 3) + b"\0\1\2")
    with pytest.raises(UserError, match="must be a complete IDX file"):
        read_idx(tmp_path, "test")


def test_colours_are_standardised_channel_by_channel():
    scaling = PixelScaling(mean=(0.1, 0.2, 0.3), std=(1.0, 2.0, 4.0))
    pixels = torch.full((2, 3, 2, 2), 255, dtype=torch.uint8)
    expected = torch.tensor([0.9, 0.4, 0.175])
    torch.testing.assert_close(scaling(pixels)[1, :, 0, 1], expected)


def test_every_set_is_complete_in_itself():
    """Planted bugs: a partner that is no data set; scaling of the wrong number of channels; a wrong test file."""
    for name, chosen in SETS.items():
        assert chosen.source.name == name
        assert len(chosen.scaling.mean) == len(chosen.scaling.std) == chosen.shape[0]
        assert set(chosen.test_files) <= {f.name for f in chosen.source.files}
        assert len(chosen.class_names) in (0, chosen.num_classes)
        assert name not in chosen.partners and chosen.partners
        for partner in chosen.partners:
            source = image_sets.partner_source(partner)
            assert source.files and (partner not in SETS or SETS[partner].shape == chosen.shape)
        for file in chosen.source.files:
            assert isinstance(file, File) and (file.length or file.checksum or file.name.endswith(".npz"))


def test_images_that_are_missing_and_cannot_be_fetched(tmp_path):
    with pytest.raises(UserError) as caught:
        MNIST.load(tmp_path / "new", 0)
    text = str(caught.value)
    assert str(tmp_path / "new" / "MNIST" / "raw") in text and "train-images-idx3-ubyte" in text
    assert "file:///nonexistent/mnist/train-images-idx3-ubyte.gz" in text
    assert "data_dir=" in text and "BNN_DATA_DIR" in text
    assert list((tmp_path / "new").iterdir()) == []


def test_a_cut_image_file_is_refused_and_kept(tmp_path, fake_mnist):
    raw = tmp_path / "MNIST" / "raw"
    raw.mkdir(parents=True)
    for name in IDX_LENGTHS:
        (raw / name).symlink_to(fake_mnist / "MNIST" / "raw" / name)
    (raw / "t10k-images-idx3-ubyte").unlink()
    (raw / "t10k-images-idx3-ubyte").write_bytes(b"x" * 1000)
    with pytest.raises(UserError) as caught:
        MNIST.load(tmp_path, 0)
    assert "t10k-images-idx3-ubyte is damaged: it must have 7,840,016 bytes; got 1,000" in str(caught.value)
    assert "train-images-idx3-ubyte is damaged or another version: its MD5 sum" in str(caught.value)
    assert (raw / "t10k-images-idx3-ubyte").exists()
