"""Which folders are classes and which are splits, and which files in them are images."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor

from bnn_runner.data.image_files import SUFFIXES
from bnn_runner.errors import UserError, did_you_mean

OOD = "ood"
Part = Literal["train", "val", "test"]
_WORDS: dict[str, Part] = {
    **dict.fromkeys(("train", "training", "trn", "tr"), "train"),
    **dict.fromkeys(("val", "valid", "validation", "validate", "dev"), "val"),
    **dict.fromkeys(("test", "testing", "tst", "te"), "test"),
}
_FILLERS = {"set", "data", "dataset", "images", "image", "imgs", "img", "split", "seg", "folder", "samples", "part"}
_SKIPPED = ("__macosx", "@eadir", "lost+found", "__pycache__")


@dataclass(frozen=True)
class Listing:
    """Images ordered by part (training, validation, test) and name, with their classes [N].

    `num_val` or `num_test` is None where there is no such folder, and the seed draws the part.
    """

    classes: tuple[str, ...]
    paths: tuple[Path, ...]
    labels: Tensor
    num_val: int | None
    num_test: int | None
    ood: dict[str, tuple[Path, ...]]
    notes: tuple[str, ...]

    @property
    def num_train(self) -> int:
        return len(self.paths) - (self.num_val or 0) - (self.num_test or 0)


def part_of(name: str) -> Part | None:
    """The split that a folder's name means, in any case and spelling.

    >>> part_of("Training"), part_of("test_set"), part_of("seg_val"), part_of("valset"), part_of("trainer")
    ('train', 'test', 'val', 'val', None)
    """
    words = [w for w in re.split(r"[\W_\d]+", name.lower()) if w]
    words = [w.removesuffix("set") if w.removesuffix("set") in _WORDS else w for w in words]
    parts = [_WORDS[w] for w in words if w in _WORDS]
    rest = [w for w in words if w not in _WORDS]
    return parts[0] if len(parts) == 1 and all(w in _FILLERS for w in rest) else None


def list_images(root: Path) -> Listing:
    """What lies under `root`. Raises `UserError` for folders of another layout."""
    if not root.is_dir():
        raise UserError(f"data.path must be a folder with one folder per class; {root} is not a folder.")
    found = _Found()
    place = _inner(root, found)
    folders = [p for p in _folders(place) if p.name.lower() != OOD]
    ood_place = next((p for p in _folders(place) if p.name.lower() == OOD), None)
    ood = {p.name: found.images(p) for p in _folders(ood_place)} if ood_place is not None else {}
    parts = {p: part_of(p.name) for p in folders}
    splits = {part: p for p, part in parts.items() if part is not None}
    if folders and all(parts.values()):
        if len(splits) < len(folders):
            raise UserError(
                f"{place} must have one folder for each split; got {', '.join(p.name for p in folders)}. Merge or "
                "rename those that mean the same split."
            )
        if "train" in splits:
            listing = _split_listing(place, splits, ood, found)
            return _with_counts(listing, found)
        raise UserError(
            f"{place} must have a folder train/ next to {' and '.join(p.name + '/' for p in folders)}. Add it, or give "
            "a folder with one folder per class."
        )
    classes, paths, labels = _labelled(place, folders, None, found)
    _refuse_equal_subfolders(place, folders)
    notes = (f"classes are the folders of {place.name}: {_few(classes)}; the seed draws the test set",)
    return _with_counts(Listing(classes, paths, labels, None, None, ood, notes), found)


def _split_listing(root: Path, splits: dict[Part, Path], ood: dict[str, tuple[Path, ...]], found: _Found) -> Listing:
    """Folders of splits, each with one folder per class."""
    classes: tuple[str, ...] = ()
    paths: tuple[Path, ...] = ()
    labels: list[Tensor] = []
    counts: dict[Part, int] = {}
    notes: list[str] = []
    order: tuple[Part, ...] = ("train", "val", "test")
    for part in order:
        if part not in splits:
            continue
        place = _inner(splits[part], found)
        folders = _folders(place)
        if part != "train" and not folders and found.images(place):
            notes.append(f"{splits[part].name}/ has images without classes: not used")
            continue
        names, more, more_labels = _labelled(place, folders, classes or None, found)
        classes, paths = names, paths + more
        labels.append(more_labels)
        counts[part] = len(more)
    meaning = {"train": "training", "val": "validation", "test": "test"}
    said = [f"{splits[p].name}/ is the {meaning[p]} part" for p in order if p in counts]
    drawn = [meaning[p] for p in ("val", "test") if p not in counts]
    said += [f"the seed draws the {' and the '.join(drawn)} part from {splits['train'].name}/"] if drawn else []
    note = f"splits: {', '.join(said)}; classes: {_few(classes)}"
    return Listing(classes, paths, torch.cat(labels), counts.get("val"), counts.get("test"), ood, (note, *notes))


def _with_counts(listing: Listing, found: _Found) -> Listing:
    notes = [*listing.notes]
    if found.nested:
        notes.append(f"read inside {', '.join(found.nested)}, the only folder there")
    if found.unread:
        read = Counter(p.suffix.lower() for p in listing.paths)
        shown = ", ".join(f"{count} {suffix}" for suffix, count in sorted(found.unread.items()))
        used = ", ".join(f"{count} {suffix}" for suffix, count in sorted(read.items()))
        notes.append(
            f"left out: {sum(found.unread.values())} files that are not read as images ({shown}); read: {used}"
        )
    if found.hidden:
        notes.append(f"left out: {found.hidden} hidden files and copies in hidden folders (.ipynb_checkpoints, ._NAME)")
    return Listing(
        listing.classes, listing.paths, listing.labels, listing.num_val, listing.num_test, listing.ood, tuple(notes)
    )


class _Found:
    """Counts what is left out while folders are read."""

    def __init__(self) -> None:
        self.unread: Counter[str] = Counter()
        self.hidden = 0
        self.nested: list[str] = []

    def images(self, folder: Path) -> tuple[Path, ...]:
        """The images under `folder`, at any depth, in the order of their names."""
        images: list[Path] = []
        for path in sorted(folder.rglob("*")):
            parts = path.relative_to(folder).parts
            if path.is_dir():
                continue
            if any(_hidden(part) for part in parts) or _is_checkpoint(path):
                self.hidden += path.suffix.lower() in SUFFIXES
            elif path.suffix.lower() in SUFFIXES:
                images.append(path)
            elif path.name.lower() not in ("thumbs.db", "desktop.ini"):
                self.unread[path.suffix.lower() or "without a suffix"] += 1
        return tuple(images)


def _is_checkpoint(path: Path) -> bool:
    """Whether Jupyter wrote the file as a copy of another one that lies next to it."""
    stem = path.stem.removesuffix("-checkpoint")
    return stem != path.stem and path.with_name(stem + path.suffix).exists()


def _hidden(name: str) -> bool:
    return name.startswith(".") or name.lower() in _SKIPPED


def _inner(folder: Path, found: _Found) -> Path:
    """The folder itself, or the only folder in it (pictures/pictures/cat), as unpacked archives have it."""
    folders = _folders(folder)
    if len(folders) != 1 or not _folders(folders[0]) or any(p.suffix.lower() in SUFFIXES for p in folder.iterdir()):
        return folder
    part = part_of(folders[0].name)
    if part is not None and part != part_of(folder.name):
        return folder
    found.nested.append(f"{folder.name}/{folders[0].name}")
    return folders[0]


def _labelled(
    folder: Path, folders: Sequence[Path], known: tuple[str, ...] | None, found: _Found
) -> tuple[tuple[str, ...], tuple[Path, ...], Tensor]:
    """Classes (those `known`, or the folders' names in order), images and their classes [N]."""
    names = known or tuple(p.name for p in folders)
    if known is None and len(names) < 2:
        raise UserError(f"{folder} must have at least 2 folders, one per class; got {len(names)}.")
    paths: list[Path] = []
    labels: list[int] = []
    for place in folders:
        if place.name not in names:
            same = [name for name in names if name.lower() == place.name.lower()]
            near = f" Did you mean {same[0]}?" if same else did_you_mean(place.name, names)
            raise UserError(
                f"{place} must be a class of the training images: {', '.join(names[:20])}.{near} Rename or delete it."
            )
        images = found.images(place)
        if not images:
            raise UserError(f"{place} has no images ({', '.join(SUFFIXES)}). Add some, or delete it.")
        paths += images
        labels += [names.index(place.name)] * len(images)
    if not paths:
        raise UserError(f"{folder} has no images. Add one folder per class.")
    return names, tuple(paths), torch.tensor(labels)


def _refuse_equal_subfolders(root: Path, folders: Sequence[Path]) -> None:
    """Raises `UserError` if all classes have the same folders: then the inner ones may be the classes."""
    inner = [{p.name for p in _folders(place)} for place in folders]
    if len(inner) > 1 and len(inner[0]) > 1 and all(names == inner[0] for names in inner):
        outer, names = _few([p.name for p in folders]), _few(sorted(inner[0]))
        raise UserError(
            f"{root} has the folders {outer}, and each of them has the folders {names}. If {names} are the classes, "
            "call the outer folders train, val and test, or give one of them as data.path. If "
            f"{outer} are the classes, move their images out of the inner folders."
        )


def _folders(folder: Path) -> list[Path]:
    return sorted(p for p in folder.iterdir() if p.is_dir() and not _hidden(p.name))


def _few(names: Sequence[str]) -> str:
    return ", ".join(names[:10]) + (f" and {len(names) - 10} more" if len(names) > 10 else "")
