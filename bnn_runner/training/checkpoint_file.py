"""Reads a checkpoint file of any program as nested mappings of tensors, without running its code.

What is no such file is named for what it is: a Git LFS pointer, an ONNX model, a folder, a web page, ....
"""

from __future__ import annotations

import argparse
import json
import pathlib
import pickle
import pickletools
import re
import warnings
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from bnn_runner.errors import UserError

INSIDE = ("state_dict", "model_state_dict", "model", "network", "net", "module", "weights", "params")
"""Entries in which common checkpoints store the state dict, next to optimiser states and counters; tried in order."""
HOW_TO_SAVE = "Save only the state dict, torch.save(network.state_dict(), 'weights.pt'), and use that file."
_WEIGHT_FILES = ("*.safetensors", "*.bin", "*.pt", "*.pth", "*.ckpt")
_INDEX = ".index.json"
_STARTS = {
    b"version https://git-lfs": "is a Git LFS pointer and not the file itself. Get the file with: git lfs pull",
    b"\x89HDF": "is an HDF5 file (Keras?). Convert it to a state dict of PyTorch.",
    b"GGUF": "is a GGUF file, whose weights are quantised. Give the original weights.",
    b"\x93NUMPY": "is a NumPy array. Give a state dict: names and tensors.",
    b"\x1f\x8b": "is a gzip archive. Unpack it and give the file inside.",
    b"{": "is a JSON file. Give the file with the weights.",
    b"<": "is a web page: the download went wrong. Download the file again.",
}
_HARMLESS: list[Any] = [argparse.Namespace, pathlib.PosixPath, pathlib.PurePosixPath, pathlib.PureWindowsPath]


def read_checkpoint(path: Path) -> Mapping[str, Any]:
    """Returns the content of a checkpoint.

    Args:
        path: A file of safetensors, of torch.save, or the index of a sharded checkpoint.

    Raises:
        UserError: If the file is missing, damaged, something else, or contains objects of other classes.
    """
    if path.is_dir():
        raise UserError(_folder_message(path))
    if not path.is_file():
        raise UserError(f"model.weights={path} does not exist. Give a .safetensors file, or one written by torch.save.")
    if path.name.endswith(_INDEX):
        return _read_shards(path)
    with path.open("rb") as file:
        start = file.read(64)
    if not start:
        raise UserError(f"model.weights={path} is empty. Copy or download the file again.")
    is_safetensors = path.suffix == ".safetensors" or start[8:10] == b'{"'
    for mark, what in _STARTS.items():
        if start.lstrip().startswith(mark) and not (is_safetensors and mark == b"{" and path.suffix == ".safetensors"):
            raise UserError(f"model.weights={path} {what}")
    if path.suffix in (".onnx", ".pb", ".tflite", ".mlmodel", ".engine", ".msgpack", ".index", ".npz"):
        raise UserError(
            f"model.weights={path} is a {path.suffix} file, which has no state dict of PyTorch. {HOW_TO_SAVE}"
        )
    return _read_safetensors(path) if is_safetensors else _read_torch(path)


def _folder_message(path: Path) -> str:
    inside = sorted(p for pattern in _WEIGHT_FILES for p in path.glob(pattern) if "optim" not in p.name)
    index = sorted(path.glob(f"*{_INDEX}"))
    if index or inside:
        return f"model.weights={path} is a folder. Give the file in it: model.weights={(index or inside)[0]}"
    if any(path.glob("*.distcp")):
        return (
            f"model.weights={path} is a distributed checkpoint. Convert it: python -m "
            f"torch.distributed.checkpoint.format_utils dcp_to_torch {path} weights.pt"
        )
    return f"model.weights={path} is a folder without weights. Give a .safetensors file, or one of torch.save."


def _read_shards(path: Path) -> Mapping[str, Any]:
    """All tensors of a sharded checkpoint (`model.safetensors.index.json` and the files that it names)."""
    try:
        names = sorted(set(json.loads(path.read_text(encoding="utf-8"))["weight_map"].values()))
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        reason = f"{type(error).__name__}: {error}"
        raise UserError(f"Could not read model.weights={path} as the index of several files ({reason}).") from error
    absent = [name for name in names if not (path.parent / name).is_file()]
    if absent:
        raise UserError(f"model.weights={path} is an index, and {', '.join(absent)} next to it is missing. Add it.")
    return {n: t for name in names for n, t in read_checkpoint(path.parent / name).items()}


def _read_safetensors(path: Path) -> Mapping[str, Any]:
    from safetensors import SafetensorError
    from safetensors.torch import load

    try:
        return load(path.read_bytes())  # memory-mapped tensors crash the process if the file is truncated later
    except (SafetensorError, OSError) as error:
        raise UserError(f"Could not read model.weights={path} as safetensors ({error}). {HOW_TO_SAVE}") from error


def _read_torch(path: Path) -> Mapping[str, Any]:
    try:
        with torch.serialization.safe_globals(_harmless()), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about the age and format of the file
            content = torch.load(path, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        raise UserError(_classes_message(path, str(error))) from error
    except (OSError, EOFError, RuntimeError, ValueError, KeyError, AttributeError, IndexError, TypeError) as error:
        if "TorchScript" in str(error):
            raise UserError(
                f'model.weights={path} is a TorchScript program. Its state dict: python -c "import torch; '
                f"torch.save(torch.jit.load('{path}', 'cpu').state_dict(), 'weights.pt')\""
            ) from error
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise UserError(f"Could not read model.weights={path} with torch ({reason}). {HOW_TO_SAVE}") from error
    if isinstance(content, nn.Module) or not isinstance(content, Mapping):
        raise UserError(
            f"model.weights={path} must contain a state dict; it contains a {type(content).__name__}. {HOW_TO_SAVE}"
        )
    return content


def _harmless() -> list[Any]:
    """Classes that checkpoints have next to the weights (arguments, numbers), whose reading runs no code."""
    import numpy as np

    try:
        from numpy._core import multiarray
    except ImportError:
        from numpy.core import multiarray  # type: ignore[no-redef]
    numbers = [np.dtype, np.ndarray, *(type(np.dtype(t)) for t in ("f2", "f4", "f8", "i4", "i8", "u1", "?"))]
    functions = [multiarray.scalar, multiarray._reconstruct]
    return [*_HARMLESS, *numbers, *functions, *((f, f"numpy.core.multiarray.{f.__name__}") for f in functions)]


def _classes_message(path: Path, error: str) -> str:
    """The message for a file with objects of other classes: which, and the line that saves its state dict."""
    if found := re.search(r"GLOBAL ([\w.]+)", error):
        what = f"an object of the class {found[1]}"
    else:
        what = "objects of other classes (a whole pickled network?)"
    strings = _strings(path)
    entry = next((name for name in INSIDE if name in strings), None)
    state = ".state_dict()" if entry is None else f"['{entry}']"
    return (
        f"model.weights={path} must contain plain tensors only; it contains {what}, and reading these could run code. "
        'If you trust the file, save its state dict where that class can be imported: python -c "import torch; c = '
        f"torch.load('{path}', 'cpu', weights_only=False); torch.save(c{state}, 'weights.pt')\""
    )


def _strings(path: Path) -> set[str]:
    """The texts in a pickled file, read without unpickling it; empty if that is not possible."""
    try:
        with zipfile.ZipFile(path) as archive:
            name = next(n for n in archive.namelist() if n.endswith("data.pkl"))
            data = archive.read(name)
        return {a for _, a, _ in pickletools.genops(data) if isinstance(a, str)}
    except Exception:  # an old or damaged file: the message does without
        return set()
