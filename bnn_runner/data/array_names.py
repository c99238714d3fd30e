"""Which arrays of an .npz file are inputs and targets, and of which part, from their names."""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from bnn_runner.errors import UserError

OOD = "x_ood_"
_ROLES = {
    **dict.fromkeys(("x", "input", "inputs", "image", "images", "feature", "features", "samples", "data"), "x"),
    **dict.fromkeys(("y", "target", "targets", "label", "labels", "class", "classes"), "y"),
}
_PARTS = {
    **dict.fromkeys(("train", "training", "trn"), "train"),
    **dict.fromkeys(("val", "valid", "validation", "dev"), "val"),
    **dict.fromkeys(("test", "testing", "tst"), "test"),
}
_WORDS = "|".join(sorted({*_ROLES, *_PARTS}, key=len, reverse=True))
_NAME = re.compile(rf"({_WORDS})_?({_WORDS})?")
KNOWN = ("x", "y", *(f"{role}_{part}" for part in ("train", "val", "test") for role in "xy"))


def meaning(name: str) -> str | None:
    """The name that this package gives to an array, from other common ones.

    >>> [meaning(n) for n in ("X", "labels", "train_images", "yVal", "X_Test", "ids")]
    ['x', 'y', 'x_train', 'y_val', 'x_test', None]
    """
    match = _NAME.fullmatch(re.sub(r"[\W_]+", "_", name.strip().lower()))
    if match is None:
        return None
    words = [w for w in match.groups() if w]
    roles, parts = [_ROLES[w] for w in words if w in _ROLES], [_PARTS[w] for w in words if w in _PARTS]
    if len(roles) != 1 or len(parts) > 1:
        return None
    return "_".join([*roles, *parts])


def named(path: Path, arrays: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """Arrays under the names x, y, x_train and so on, and notes on other names.

    Raises:
        UserError: inputs or targets are missing, or two arrays have the same meaning.
    """
    found: dict[str, str] = {name: name for name in arrays if name in KNOWN}
    others = [name for name in arrays if name not in KNOWN and not name.startswith(OOD)]
    for name in others:
        known = meaning(name)
        if known is not None and known in found and found[known] != known:
            raise UserError(f"{path}: {found[known]} and {name} may both be {known}. {_advice(path, 'Choose', arrays)}")
        if known is not None:
            found.setdefault(known, name)
    if not found and sorted(arrays) == ["arr_0", "arr_1"]:
        found = {"x": "arr_0", "y": "arr_1"}
    parts = {name for name in found if "_" in name}
    whole = {"x", "y"} <= set(found)
    halves = {"x_train", "y_train"} <= set(found)
    if whole == halves or any(f"{'yx'['xy'.index(n[0])]}{n[1:]}" not in found for n in parts):
        raise UserError(
            f"{path} must contain either x and y (split by the seed) or x_train, y_train, x_test, y_test (and x_val, "
            f"y_val); got {', '.join(f'{n} {list(a.shape)}' for n, a in arrays.items()) or 'nothing'}. "
            f"{_advice(path, 'Write them', arrays)}"
        )
    used = {known: arrays[name] for known, name in found.items()}
    used |= {name: a for name, a in arrays.items() if name.startswith(OOD)}
    renamed = [f"{name} is read as {known}" for known, name in found.items() if name != known]
    unused = [name for name in others if name not in found.values()]
    notes = [", ".join(renamed)] if renamed else []
    return used, notes + ([f"not used: {', '.join(unused)}"] if unused else [])


def line(path: Path, names: Sequence[str], **written: str) -> str:
    """A command that writes the file again; `written` are expressions of a, the old file. Other arrays are kept."""
    kept = [name for name in names if name not in written]
    arguments = ", ".join([*(f"{k}={v}" for k, v in written.items()), *(f"{n}=a[{n!r}]" for n in kept)])
    other = str(path.with_name(f"{path.stem}_2.npz"))
    code = f"import numpy as np; a = np.load({str(path)!r}); np.savez({other!r}, {arguments})"
    return f"python -c {shlex.quote(code)}"


def _advice(path: Path, verb: str, arrays: Mapping[str, Any]) -> str:
    names = [name for name in arrays if not name.startswith(OOD)]
    if len(names) < 2:
        return "Write them with numpy.savez(file, x=..., y=...)."
    return f"{verb} with the right names in: {line(path, [], x=f'a[{names[0]!r}]', y=f'a[{names[1]!r}]')}"
