"""Posteriors on disk: plain tensors (safetensors) and a JSON file with their structure.

A posterior is saved as a tree of frozen dataclasses, mappings, sequences, numbers and tensors; any other
part implements `Saves`. Networks are saved as weights: the module that gives them their shape is built again
from the run's configuration. Reading creates only dataclasses and `Saves` of packages that the run trusts, so
that a file never runs code. A posterior of another run (network, data, method) is refused. It loads on any device.
"""

from __future__ import annotations

import dataclasses
import hashlib
import importlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load as tensors_from_bytes
from safetensors.torch import save as tensors_to_bytes
from torch import Tensor, nn

from bnn_runner.base import Posterior
from bnn_runner.errors import UserError
from bnn_runner.runtime.files import write_atomically, write_json
from bnn_runner.tasks import Task

TENSORS, FACTS = "posterior.safetensors", "posterior.json"
FORMAT = 2
"""2: a posterior's report is a `FitReport`."""


@runtime_checkable
class Saves(Protocol):
    """A part of a posterior that is not a frozen dataclass of plain values, and provides its own state."""

    def state(self) -> dict[str, Any]:
        """Its parts by name: tensors, numbers, strings, sequences, mappings, frozen dataclasses."""
        ...

    @classmethod
    def from_state(cls, state: Mapping[str, Any]) -> Any:
        """The same object from its `state`."""
        ...


class CannotBeSaved(Exception):
    """Something in the posterior is not a plain value; the message names it."""


class UnreadablePosterior(UserError):
    """A saved posterior that is missing, damaged, or of another run."""


# ------------------------------------------------------------------------------------- writing


def save(posterior: Posterior, folder: Path, belongs_to: Mapping[str, str], task: Task | None = None) -> None:
    """Write `posterior` into `folder`.

    Args:
        posterior: what is saved.
        folder: that of the cell.
        belongs_to: fingerprints that `load` requires again.
        task: its scaling, categories and column order are saved too, so that new points can be predicted without the
            data. A task that is not of plain values is left out.

    Raises:
        CannotBeSaved: a part is not a plain value; nothing is written then.
    """
    packer = _Packer()
    tree = packer.pack(posterior, type(posterior).__name__)
    try:
        packed = None if task is None else packer.pack(task.without_points(), "Task")
    except CannotBeSaved:
        packed = None
    data = tensors_to_bytes(packer.tensors)
    facts = {"format": FORMAT, "belongs_to": dict(belongs_to), "digest": _digest(data), "posterior": tree}
    facts |= {} if packed is None else {"task": packed}
    (folder / FACTS).unlink(missing_ok=True)
    write_atomically(folder / TENSORS, lambda f: f.write(data))
    write_json(folder / FACTS, facts)  # last: it carries the digest of the tensors


def is_saved(folder: Path) -> bool:
    """Whether a posterior is saved in `folder` (which does not check that it is intact)."""
    return (folder / FACTS).is_file()


def load_task(folder: Path, device: torch.device, allow: Sequence[str] = ()) -> Task | None:
    """The task that is saved with a posterior: how new points are prepared, without points. None if there is none.

    It is also None for a damaged file; `load` then says what is wrong.
    """
    try:
        facts = json.loads((folder / FACTS).read_bytes())
        data = (folder / TENSORS).read_bytes()
        if facts["format"] != FORMAT or facts["digest"] != _digest(data):
            return None
        tree = facts.get("task")
        unpacker = _Unpacker(tensors_from_bytes(data), nn.Module(), device, ("bnn_runner", *allow))
        task: Task | None = None if tree is None else unpacker.unpack(tree)
    except (OSError, ValueError, KeyError, TypeError, ImportError, SafetensorError, UnreadablePosterior):
        return None
    return task


@dataclass
class _Packer:
    tensors: dict[str, Tensor] = field(default_factory=dict)
    _known: dict[int, dict[str, Any]] = field(default_factory=dict)
    _alive: list[Tensor] = field(default_factory=list)

    def pack(self, value: Any, where: str) -> Any:
        """`value` as JSON, with its tensors stored separately. `where` names it in errors."""
        if value is None or isinstance(value, (bool, int, float, str)):
            return value
        if isinstance(value, np.generic):
            return value.item()
        if isinstance(value, Tensor):
            return self._tensor(value, where)
        if isinstance(value, torch.dtype):
            return {"dtype": str(value).removeprefix("torch.")}
        if isinstance(value, torch.device):
            return {"device": value.type}
        if isinstance(value, nn.Module):
            return {"module": shape_of(value)}
        if isinstance(value, Mapping):
            return {"dict": [[self.pack(k, where), self.pack(v, f"{where}[{k!r}]")] for k, v in value.items()]}
        if isinstance(value, (list, tuple)):
            items = [self.pack(v, f"{where}[{i}]") for i, v in enumerate(value)]
            return {"tuple": items} if isinstance(value, tuple) else items
        if isinstance(value, Saves):
            return {"class": _name_of(type(value)), "state": self.pack(value.state(), where)}
        if dataclasses.is_dataclass(value) and not isinstance(value, type):
            # Fields with a leading underscore are caches: they start empty.
            names = [f.name for f in dataclasses.fields(value) if f.init and not f.name.startswith("_")]
            fields = {n: self.pack(getattr(value, n), f"{where}.{n}") for n in names}
            return {"class": _name_of(type(value)), "fields": fields}
        raise CannotBeSaved(f"{where} must be a tensor, number, string or dataclass; it is a {type(value).__name__}")

    def _tensor(self, tensor: Tensor, where: str) -> dict[str, Any]:
        if id(tensor) not in self._known:
            plain = tensor.detach().cpu()
            # A matrix stored by columns is restored by columns, so that products round as before.
            by_columns = plain.dim() == 2 and not plain.is_contiguous() and plain.mT.is_contiguous()
            key = f"{len(self.tensors)}/{where}"
            self.tensors[key] = (plain.mT if by_columns else plain).contiguous().clone()
            self._known[id(tensor)] = {"tensor": key, "by_columns": True} if by_columns else {"tensor": key}
            self._alive.append(tensor)  # an id is unique only while its tensor is alive
        return self._known[id(tensor)]


def _name_of(cls: type) -> str:
    if "<locals>" in cls.__qualname__:
        raise CannotBeSaved(f"{cls.__qualname__} must be defined at the top of a module, not inside a function")
    return f"{cls.__module__}:{cls.__qualname__}"


def shape_of(module: nn.Module) -> str:
    """A digest of the names and shapes of a module's parameters and buffers (not of their values)."""
    named = [*module.named_parameters(), *module.named_buffers()]
    text = json.dumps([[name, list(t.shape)] for name, t in named])
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


def _digest(data: bytes) -> str:
    return hashlib.blake2b(data, digest_size=16).hexdigest()


# ------------------------------------------------------------------------------------- reading


def load(
    folder: Path,
    belongs_to: Mapping[str, str],
    module: nn.Module,
    device: torch.device,
    allow: Sequence[str] = (),
) -> Posterior:
    """The posterior saved in `folder`.

    Args:
        folder: that of the cell.
        belongs_to: fingerprints of the run; other ones mean that it was fitted to another network or other data.
        module: gives the posterior's networks their shape.
        device: of its tensors.
        allow: packages outside bnn_runner whose classes are trusted.

    Raises:
        UnreadablePosterior: none is saved, it is damaged, or it belongs to another run.
    """
    try:
        facts = json.loads((folder / FACTS).read_bytes())
        data = (folder / TENSORS).read_bytes()
        if facts["format"] != FORMAT:
            raise UnreadablePosterior(
                f"Could not read the posterior saved in {folder}: it has format {facts['format']}, and this version "
                f"reads format {FORMAT}. Run the cell again with save_posterior=true force=true."
            )
        if facts["digest"] != _digest(data):
            raise ValueError(f"{TENSORS} does not match {FACTS}")
        tensors = tensors_from_bytes(data)
    except FileNotFoundError as error:
        missing = Path(error.filename).name
        raise UnreadablePosterior(
            f"No posterior is saved in {folder} ({missing} is missing). Run the cell again with save_posterior=true "
            "force=true."
        ) from None
    except (ValueError, KeyError, TypeError, SafetensorError) as error:
        raise UnreadablePosterior(
            f"Could not read the posterior saved in {folder}: {error}. Run the cell again with save_posterior=true "
            "force=true."
        ) from None
    written = facts.get("belongs_to")
    if written != dict(belongs_to):
        other = [k for k in belongs_to if not isinstance(written, dict) or written.get(k) != belongs_to[k]]
        raise UnreadablePosterior(
            f"The posterior saved in {folder} belongs to another run: its {' and '.join(other) or 'contents'} differ. "
            "Remove the file, or run the cell again with save_posterior=true force=true."
        )
    try:
        posterior: Posterior = _Unpacker(tensors, module, device, ("bnn_runner", *allow)).unpack(facts["posterior"])
    except (TypeError, KeyError, ImportError) as error:  # a field or class that is new, removed or renamed
        raise UnreadablePosterior(
            f"Could not read the posterior saved in {folder}: it was written by another version ({error}). Remove the "
            "file (the posterior is then fitted again), or run the cell again with save_posterior=true force=true."
        ) from None
    return posterior


@dataclass(frozen=True)
class _Unpacker:
    tensors: Mapping[str, Tensor]
    module: nn.Module
    device: torch.device
    trusted: tuple[str, ...]

    def unpack(self, tree: Any) -> Any:
        if isinstance(tree, list):
            return [self.unpack(v) for v in tree]
        if not isinstance(tree, dict):
            return tree
        if "tensor" in tree:
            tensor = self.tensors[tree["tensor"]].to(self.device)
            return tensor.mT if tree.get("by_columns") else tensor
        if "dict" in tree:
            return {self.unpack(k): self.unpack(v) for k, v in tree["dict"]}
        if "tuple" in tree:
            return tuple(self.unpack(v) for v in tree["tuple"])
        if "dtype" in tree:
            return getattr(torch, tree["dtype"])
        if "device" in tree:
            return self.device
        if "module" in tree:
            if tree["module"] != shape_of(self.module):
                raise UnreadablePosterior(
                    "The saved posterior belongs to a network of another shape than this run's model."
                )
            return self.module
        cls = self._class(tree["class"])
        if "state" in tree:
            return cls.from_state(self.unpack(tree["state"]))
        return cls(**{name: self.unpack(v) for name, v in tree["fields"].items()})

    def _class(self, name: str) -> Any:
        """A dataclass or `Saves` class of a trusted package; nothing else is imported."""
        module_name, _, qualname = name.partition(":")
        if module_name.split(".")[0] not in self.trusted:
            raise UnreadablePosterior(
                f"The saved posterior uses {name} of a package that is not trusted. To trust it, add "
                f"allow=[{module_name.split('.')[0]}]."
            )
        found: Any = importlib.import_module(module_name)
        for part in qualname.split("."):
            found = getattr(found, part, None)
        if not (isinstance(found, type) and (dataclasses.is_dataclass(found) or hasattr(found, "from_state"))):
            raise UnreadablePosterior(
                f"The saved posterior uses {name}, which this version does not have. Run the cell again with "
                "save_posterior=true force=true."
            )
        return found
