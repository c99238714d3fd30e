"""The cache of trained networks. MAP, all Laplace structures and member i of an ensemble share a network.

An entry is one safetensors file, written atomically, with a digest of its tensors. An entry that is not readable or
does not match its digest is renamed, and the network is trained again.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor, nn

from bnn_runner.base import Network
from bnn_runner.models.likelihoods import Gaussian, likelihood_name, named_likelihood
from bnn_runner.runtime.files import write_atomically

_NOISE = "likelihood/log_noise"


class NetworkCache:
    """Trained networks by key in `root`/networks, and checkpoints of unfinished ones in `root`/partial."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def path(self, key: str) -> Path:
        return self.root / "networks" / f"{key}.safetensors"

    def partial(self, key: str) -> Path:
        """Path of the checkpoint of an unfinished training."""
        return self.root / "partial" / f"{key}.pt"

    def storing_marker(self, name: str) -> Path:
        """Path of a file that lists the keys of a group of lanes while its networks are being stored."""
        return self.root / "partial" / f"{name}.json"

    def partly_stored(self) -> list[list[str]]:
        """Returns the keys of each group of lanes that is being stored, or whose process was killed while storing."""
        groups = []
        for path in self.root.glob("partial/*.json"):
            with contextlib.suppress(FileNotFoundError):  # the group has been stored in the meantime
                groups.append(json.loads(path.read_text(encoding="utf-8")))
        return groups

    def has(self, key: str) -> bool:
        """Whether an entry exists (reading it may still show that it is damaged)."""
        return self.path(key).exists()

    def store(self, network: Network) -> None:
        """Writes an entry. Another process that writes the same key writes the same content, so the last one wins."""
        tensors = {f"parameters/{n}": t for n, t in network.parameters.items()}
        tensors |= {f"buffers/{n}": t for n, t in network.buffers.items()}
        if isinstance(network.likelihood, Gaussian):
            tensors[_NOISE] = network.likelihood.log_noise
        tensors = {n: t.detach().cpu().contiguous() for n, t in tensors.items()}
        about = {
            "history": list(network.history),
            "likelihood": likelihood_name(network.likelihood),
            "prior_precision": network.prior_precision,
            "seconds": network.seconds,
            "tuning": list(network.tuning),
            "digest": content_digest(tensors),
        }
        payload = save(tensors, {"about": json.dumps(about)})
        write_atomically(self.path(network.key), lambda f: f.write(payload))

    def load(self, key: str, module: nn.Module, device: torch.device, dtype: torch.dtype) -> Network | None:
        """Reads an entry.

        Args:
            key: The key of the network.
            module: A module of the same architecture; the network uses it.
            device: Where the tensors go.
            dtype: Type of floating-point tensors.

        Returns:
            The network, or None if there is no entry or it is damaged.
        """
        path = self.path(key)
        try:
            with safe_open(path, framework="pt") as f:
                # Cloned, because memory-mapped tensors crash the process if the file is truncated later.
                tensors = {n: f.get_tensor(n).clone() for n in f.keys()}  # noqa: SIM118 - not a mapping
                about = json.loads((f.metadata() or {})["about"])
            if about["digest"] != content_digest(tensors):
                raise ValueError("digest")
            noise = tensors[_NOISE].to(device, dtype) if _NOISE in tensors else None
            likelihood = named_likelihood(about["likelihood"], noise)
        except FileNotFoundError:
            return None
        except (SafetensorError, OSError, ValueError, KeyError):
            path.replace(path.with_suffix(".damaged"))
            return None
        network = Network(
            module=module,
            parameters=_strip(tensors, "parameters/", device, dtype),
            buffers=_strip(tensors, "buffers/", device, dtype),
            likelihood=likelihood,
            prior_precision=about["prior_precision"],
            key=key,
            history=tuple(about["history"]),
            seconds=about["seconds"],
            tuning=tuple(about.get("tuning", ())),
        )
        expected = {n: p.shape for n, p in module.named_parameters()}
        if {n: p.shape for n, p in network.parameters.items()} != expected:
            path.replace(path.with_suffix(".damaged"))
            return None
        # The posterior orders its weights as the module orders its parameters.
        return replace(network, parameters={n: network.parameters[n] for n in expected})


def _strip(tensors: Mapping[str, Tensor], prefix: str, device: torch.device, dtype: torch.dtype) -> dict[str, Tensor]:
    selected = {n.removeprefix(prefix): t for n, t in tensors.items() if n.startswith(prefix)}
    return {n: t.to(device, dtype if t.is_floating_point() else None) for n, t in selected.items()}


def content_digest(tensors: Mapping[str, Tensor]) -> str:
    """Returns a digest of the tensors' names, types, shapes and bytes."""
    h = hashlib.blake2b(digest_size=16)
    for name in sorted(tensors):
        t = tensors[name].contiguous()
        h.update(f"{name}:{t.dtype}:{tuple(t.shape)};".encode())
        h.update(t.reshape(-1).view(torch.uint8).numpy().tobytes() if t.numel() else b"")
    return h.hexdigest()
