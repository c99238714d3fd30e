"""Where the published image sets come from: files, lengths, checksums, and download addresses.

Addresses and checksums of archives are those of torchvision.
"""

from __future__ import annotations

from pathlib import Path

from bnn_runner.data.sources import Archive, File, Source

IDX_LENGTHS = {
    "train-images-idx3-ubyte": 47_040_016,
    "train-labels-idx1-ubyte": 60_008,
    "t10k-images-idx3-ubyte": 7_840_016,
    "t10k-labels-idx1-ubyte": 10_008,
}
"""MNIST's files with their lengths; Fashion-MNIST's and KMNIST's have the same names and lengths."""


def _idx_source(
    name: str, folder: str, mirrors: tuple[str, ...], archives: tuple[str, ...], files: tuple[str, ...], *elsewhere: str
) -> Source:
    """`archives` and `files` are MD5 sums in the order of `IDX_LENGTHS`, packed and unpacked."""
    return Source(
        name=name,
        folder=f"{folder}/raw",
        files=tuple(File(n, length, md5) for (n, length), md5 in zip(IDX_LENGTHS.items(), files, strict=True)),
        archives=tuple(
            Archive(tuple(f"{mirror}{n}.gz" for mirror in mirrors), md5)
            for n, md5 in zip(IDX_LENGTHS, archives, strict=True)
        ),
        elsewhere=tuple(Path(other) for other in elsewhere),
    )


_CIFAR10_MD5 = {
    "data_batch_1": (31_035_704, "c99cafc152244af753f735de768cd75f"),
    "data_batch_2": (31_035_320, "d4bba439e000b95fd0a9bffe97cbabec"),
    "data_batch_3": (31_035_999, "54ebc095f3ab1f0389bbae665268c751"),
    "data_batch_4": (31_035_696, "634d18415352ddfa80567beed471001a"),
    "data_batch_5": (31_035_623, "482c414d41f54cd18b22e5b47cb7c3cb"),
    "test_batch": (31_035_526, "40351d587109b95175f43aff81a1287e"),
    "batches.meta": (158, "5ff9c542aee3614f3951f8cda6e48888"),
}

SOURCES = {
    "mnist": _idx_source(
        "mnist",
        "MNIST",
        ("https://ossci-datasets.s3.amazonaws.com/mnist/", "http://yann.lecun.com/exdb/mnist/"),
        (
            "f68b3c2dcbeaaa9fbdd348bbdeb94873",
            "d53e105ee54ea40749a09fcbcd1e9432",
            "9fb629c4189551a2d022fa330f9573f3",
            "ec29112dd5afa0611ce80d1b7f02629c",
        ),
        (
            "6bbc9ace898e44ae57da46a324031adb",
            "a25bea736e30d166cdddb491f175f624",
            "2646ac647ad5339dbf082846283269ea",
            "27ae3e4e09519cfbb04c329615203637",
        ),
    ),
    "fashion_mnist": _idx_source(
        "fashion_mnist",
        "FashionMNIST",
        ("http://fashion-mnist.s3-website.eu-central-1.amazonaws.com/",),
        (
            "8d4fb7e6c68d591d4c3dfef9ec88bf0d",
            "25c81989df183df01b3e8a0aad5dffbe",
            "bef4ecab320f06d8554ea6380940ec79",
            "bb300cfdad3c16e7a12a480ee83cd310",
        ),
        ("", "", "", ""),
        "/usr/share/datasets/fashion-mnist",  # Debian's package dataset-fashion-mnist
    ),
    "kmnist": _idx_source(
        "kmnist",
        "KMNIST",
        ("http://codh.rois.ac.jp/kmnist/dataset/kmnist/",),
        (
            "bdb82020997e1d708af4cf47b453dcf7",
            "e144d726b3acfaa3e44228e80efcd344",
            "5c965bf0a639b31b8f53240b1b52f4d7",
            "7320c461ea6c1c855c0b718fb2a4b134",
        ),
        ("", "", "", ""),
    ),
    "cifar10": Source(
        name="cifar10",
        folder="cifar-10-batches-py",
        files=tuple(File(n, length, md5) for n, (length, md5) in _CIFAR10_MD5.items()),
        archives=(
            Archive(("https://www.cs.toronto.edu/~kriz/cifar-10-python.tar.gz",), "c58f30108f718f92721af3b95e74349a"),
        ),
    ),
    "cifar100": Source(
        name="cifar100",
        folder="cifar-100-python",
        files=(
            File("train", checksum="16019d7e3df5f24257cddd939b257f8d"),
            File("test", checksum="f0ef6b0ae62326f3e7ffdfab6717acfc"),
            File("meta", checksum="7973b15100ade9c7d40fb424638fde48"),
        ),
        archives=(
            Archive(("https://www.cs.toronto.edu/~kriz/cifar-100-python.tar.gz",), "eb9058c3a382ffc7106e4002c42a8d85"),
        ),
    ),
    "svhn": Source(
        name="svhn",
        folder="",
        files=(
            File("train_32x32.mat", 182_040_794, "e26dedcc434d2e4c54c9b2d4a06d8373"),
            File("test_32x32.mat", 64_275_384, "eb5a983be6a315427106f1b164d9cef3"),
        ),
        archives=(
            Archive(("http://ufldl.stanford.edu/housenumbers/train_32x32.mat",), "e26dedcc434d2e4c54c9b2d4a06d8373"),
            Archive(("http://ufldl.stanford.edu/housenumbers/test_32x32.mat",), "eb5a983be6a315427106f1b164d9cef3"),
        ),
    ),
    "cifar100_subset": Source(
        name="cifar100_subset",
        folder="",
        files=(File("cifar100_subset.npz"),),
        by_hand="It must contain the arrays train_images and train_labels (50 images per class), test_images "
        "and test_labels.",
    ),
    "notmnist": Source(
        name="notmnist",
        folder="",
        files=(File("notMNIST_test.npz"),),
        by_hand="It must contain an array test_images of letters [N, 28, 28].",
    ),
}
