"""The cache of trained networks: MAP, every Laplace structure and member i of an ensemble share them.

An entry is one safetensors file, written whole or not at all, with a digest of its tensors. What
cannot be read, or does not match its digest, is set aside and trained anew: never trusted.
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
    """Trained networks under `root`/networks by key, unfinished ones under `root`/partial."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def path(self, key: str) -> Path:
        return self.root / "networks" / f"{key}.safetensors"

    def partial(self, key: str) -> Path:
        """Where the checkpoint of a training in progress lies."""
        return self.root / "partial" / f"{key}.pt"

    def group_note(self, name: str) -> Path:
        """Where it stands, while the networks of a group of lanes are being stored, which they are."""
        return self.root / "partial" / f"{name}.json"

    def half_stored(self) -> list[list[str]]:
        """The keys of each group of lanes that is being stored, or whose process was killed meanwhile."""
        found = []
        for path in self.root.glob("partial/*.json"):
            with contextlib.suppress(FileNotFoundError):  # stored meanwhile
                found.append(json.loads(path.read_text(encoding="utf-8")))
        return found

    def has(self, key: str) -> bool:
        """Whether there is an entry (it may yet turn out damaged when it is read)."""
        return self.path(key).exists()

    def store(self, network: Network) -> None:
        """Write an entry; another writer of the same key has the same content, so the last one may win."""
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
        """The network of `key` for a module of its shape, or None if there is no sound entry."""
        path = self.path(key)
        try:
            with safe_open(path, framework="pt") as f:
                # Copies: what is mapped from the file would end the process if the file were cut short later.
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
        # The module's own order of parameters is the order of the posterior's weights.
        return replace(network, parameters={n: network.parameters[n] for n in expected})


def _strip(tensors: Mapping[str, Tensor], prefix: str, device: torch.device, dtype: torch.dtype) -> dict[str, Tensor]:
    chosen = {n.removeprefix(prefix): t for n, t in tensors.items() if n.startswith(prefix)}
    return {n: t.to(device, dtype if t.is_floating_point() else None) for n, t in chosen.items()}


def content_digest(tensors: Mapping[str, Tensor]) -> str:
    """Digest of names, types, shapes and bytes."""
    h = hashlib.blake2b(digest_size=16)
    for name in sorted(tensors):
        t = tensors[name].contiguous()
        h.update(f"{name}:{t.dtype}:{tuple(t.shape)};".encode())
        h.update(t.reshape(-1).view(torch.uint8).numpy().tobytes() if t.numel() else b"")
    return h.hexdigest()
