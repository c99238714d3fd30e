"""Posteriors on disk: plain tensors (safetensors) and a JSON file that says how they hang together.

A posterior is a tree of frozen dataclasses, mappings, sequences, numbers and tensors, and is written as
such; a part that is no such thing implements `Saves`. Networks are kept as weights: the module that
gives them their shape is made again from the run's configuration. Reading makes only dataclasses and
`Saves` of packages that the run trusts, so a file cannot run code; it is refused when it was written
by another run (network, data, method), and it opens on any device.
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

TENSORS, FACTS = "posterior.safetensors", "posterior.json"
FORMAT = 2
"""2: a posterior's report is a `FitReport`."""


@runtime_checkable
class Saves(Protocol):
    """A part of a posterior that is no frozen dataclass of plain values, and tells itself what it consists of."""

    def state(self) -> dict[str, Any]:
        """Its parts by name: tensors, numbers, texts, sequences, mappings, frozen dataclasses."""
        ...

    @classmethod
    def from_state(cls, state: Mapping[str, Any]) -> Any:
        """The same object from what `state` gave."""
        ...


class CannotBeSaved(Exception):
    """Something in the posterior is no plain value; the message names it."""


class StoredElsewhere(UserError):
    """A saved posterior that is absent, damaged, or of another run."""


# ------------------------------------------------------------------------------------- writing


def save(posterior: Posterior, folder: Path, belongs_to: Mapping[str, str]) -> None:
    """Write `posterior` into `folder`. `belongs_to` are fingerprints that a reader must show again.

    Raises `CannotBeSaved`, before anything is written, for a posterior with parts that are no plain values.
    """
    packer = _Packer()
    tree = packer.pack(posterior, type(posterior).__name__)
    data = tensors_to_bytes(packer.tensors)
    facts = {"format": FORMAT, "belongs_to": dict(belongs_to), "digest": _digest(data), "posterior": tree}
    (folder / FACTS).unlink(missing_ok=True)
    write_atomically(folder / TENSORS, lambda f: f.write(data))
    write_json(folder / FACTS, facts)  # last: it carries the digest of the tensors


def is_saved(folder: Path) -> bool:
    """Whether a posterior lies in `folder` (it may turn out damaged when it is read)."""
    return (folder / FACTS).is_file()


@dataclass
class _Packer:
    tensors: dict[str, Tensor] = field(default_factory=dict)
    _known: dict[int, dict[str, Any]] = field(default_factory=dict)
    _alive: list[Tensor] = field(default_factory=list)

    def pack(self, value: Any, where: str) -> Any:
        """`value` as JSON, its tensors put aside. `where` names it in errors."""
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
            # Fields with a leading underscore are caches: they begin empty.
            names = [f.name for f in dataclasses.fields(value) if f.init and not f.name.startswith("_")]
            fields = {n: self.pack(getattr(value, n), f"{where}.{n}") for n in names}
            return {"class": _name_of(type(value)), "fields": fields}
        raise CannotBeSaved(f"{where} is a {type(value).__name__}, which is no tensor, number, text or dataclass")

    def _tensor(self, tensor: Tensor, where: str) -> dict[str, Any]:
        if id(tensor) not in self._known:
            plain = tensor.detach().cpu()
            # A matrix that lies in memory by columns comes back so: products round as they did before.
            by_columns = plain.dim() == 2 and not plain.is_contiguous() and plain.mT.is_contiguous()
            key = f"{len(self.tensors)}/{where}"
            self.tensors[key] = (plain.mT if by_columns else plain).contiguous().clone()
            self._known[id(tensor)] = {"tensor": key, "by_columns": True} if by_columns else {"tensor": key}
            self._alive.append(tensor)  # an id stays this tensor's as long as it lives
        return self._known[id(tensor)]


def _name_of(cls: type) -> str:
    if "<locals>" in cls.__qualname__:
        raise CannotBeSaved(f"{cls.__qualname__} is a class inside a function, which cannot be found again")
    return f"{cls.__module__}:{cls.__qualname__}"


def shape_of(module: nn.Module) -> str:
    """A digest of the names and shapes of a module's parameters and buffers (not of their numbers)."""
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
    """The posterior saved in `folder`, on `device`; `module` gives its networks their shape.

    Raises `StoredElsewhere` where there is none, where it is damaged, or where its fingerprints are
    not `belongs_to`: then it was fitted to another network or other data.
    """
    try:
        facts = json.loads((folder / FACTS).read_bytes())
        data = (folder / TENSORS).read_bytes()
        if facts["format"] != FORMAT:
            raise StoredElsewhere(
                f"The posterior saved in {folder} has format {facts['format']}; this version reads {FORMAT}. "
                "Run the cell again with save_posterior=true."
            )
        if facts["digest"] != _digest(data):
            raise ValueError(f"{TENSORS} is not the file that {FACTS} was written with")
        tensors = tensors_from_bytes(data)
    except FileNotFoundError as error:
        missing = Path(error.filename).name
        raise StoredElsewhere(
            f"No posterior is saved in {folder} ({missing} is missing). Run the cell again with save_posterior=true."
        ) from None
    except (ValueError, KeyError, TypeError, SafetensorError) as error:
        raise StoredElsewhere(
            f"The posterior saved in {folder} is damaged: {error}. Run the cell again with save_posterior=true."
        ) from None
    written = facts.get("belongs_to")
    if written != dict(belongs_to):
        other = [k for k in belongs_to if not isinstance(written, dict) or written.get(k) != belongs_to[k]]
        raise StoredElsewhere(
            f"The posterior saved in {folder} belongs to another run: its {' and '.join(other) or 'contents'} differ. "
            "Take the file away, or run the cell again with save_posterior=true."
        )
    try:
        posterior: Posterior = _Unpacker(tensors, module, device, ("bnn_runner", *allow)).unpack(facts["posterior"])
    except (TypeError, KeyError, ImportError) as error:  # a field or class that came, went or has another name
        raise StoredElsewhere(
            f"The posterior saved in {folder} was written by another version of the program ({error}). Take the file "
            "away (it is then fitted again), or run the cell again with save_posterior=true."
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
                raise StoredElsewhere("The saved posterior is of a network of another shape than this run's model.")
            return self.module
        cls = self._class(tree["class"])
        if "state" in tree:
            return cls.from_state(self.unpack(tree["state"]))
        return cls(**{name: self.unpack(v) for name, v in tree["fields"].items()})

    def _class(self, name: str) -> Any:
        """A dataclass or `Saves` class of a trusted package, and nothing else that can be called."""
        module_name, _, qualname = name.partition(":")
        if module_name.split(".")[0] not in self.trusted:
            raise StoredElsewhere(
                f"The saved posterior uses {name}, and {module_name.split('.')[0]} is not a package that you trust. "
                f"If you do, run with allow=[{module_name.split('.')[0]}]."
            )
        found: Any = importlib.import_module(module_name)
        for part in qualname.split("."):
            found = getattr(found, part, None)
        if not (isinstance(found, type) and (dataclasses.is_dataclass(found) or hasattr(found, "from_state"))):
            raise StoredElsewhere(f"The saved posterior uses {name}, which this version does not have. Fit it again.")
        return found
