"""Which weights the posterior is over, and which are held at MAP by their kind."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, get_args

import torch
from torch import Tensor, nn
from torch.func import functional_call

from bnn_runner.base import Network
from bnn_runner.errors import RunFailed
from bnn_runner.runtime.torch_state import evaluation_mode, plain_attention
from bnn_runner.tasks import Task

HeldKind = Literal["norm", "bias", "embedding", "attention"]

_NORMS = (nn.modules.batchnorm._NormBase, nn.LayerNorm, nn.GroupNorm, nn.RMSNorm)
_EMBEDDINGS = (nn.Embedding, nn.EmbeddingBag)
_TABLES = ("token", "position", "embed")


@dataclass(frozen=True)
class Basis:
    """The tensors that the posterior is over.

    Attributes:
        names: of the tensors.
        described: the same in words.
        treatment: of every other tensor.
        notes: for a reader.
    """

    names: tuple[str, ...]
    described: str
    treatment: dict[str, str]
    notes: tuple[str, ...]


def kinds_of(module: nn.Module, name: str) -> frozenset[HeldKind]:
    """The kinds that a parameter belongs to; mostly none, sometimes two (a bias of an attention projection).

    norm: scale and shift of torch's normalisation layers, and all of a module whose class name ends with
    Norm. bias: a tensor called bias or ..._bias elsewhere. embedding: the tables of torch's
    embeddings, all within a module whose class name ends with Embedding, and learned tokens or
    positions by their names. attention: all within torch's multi-head attention, or a module whose
    class name ends with Attention.
    """
    place, _, last = name.rpartition(".")
    steps = place.split(".") if place else []
    within = [module.get_submodule(".".join(steps[:i])) for i in range(len(steps) + 1)]
    owner = within[-1]
    if isinstance(owner, _NORMS) or _called(owner, "Norm"):
        return frozenset({"norm"})
    found: set[HeldKind] = set()
    if last == "bias" or last.endswith("_bias"):
        found.add("bias")
    named = any(word in last.lower() for word in _TABLES)
    if named or isinstance(owner, _EMBEDDINGS) or any(_called(m, "Embedding", "Embeddings") for m in within):
        found.add("embedding")
    if any(isinstance(m, nn.MultiheadAttention) or _called(m, "Attention") for m in within):
        found.add("attention")
    return frozenset(found)


def _called(module: nn.Module, *ends: str) -> bool:
    return type(module).__name__.endswith(ends)


def select_basis(
    network: Network, task: Task, weights: Literal["all", "last_layer"], hold: Sequence[HeldKind]
) -> Basis:
    """All weights or those of the last layer, without those of the kinds in `hold`.

    Raises:
        RunFailed: no weight is left.
    """
    names = tuple(network.parameters)
    if weights == "last_layer":
        x, _ = task.train.gather(torch.arange(min(2, len(task.train))))
        names = last_layer_names(network, x)
    treatment = dict.fromkeys(network.parameters, "held at MAP (outside the basis)")
    kinds = {name: kinds_of(network.module, name) for name in names}
    described, notes = "all weights" if weights == "all" else "last-layer weights", []
    for kind in get_args(HeldKind):
        if kind in hold:
            held = [name for name in names if kind in kinds[name]]
            treatment |= dict.fromkeys(held, f"held at MAP (method.hold={kind})")
            if held:
                described += f"{' and' if ' but' in described else ' but'} {kind}"
            else:
                notes.append(f"method.hold={kind}: the network has no such weights among those of method.weights")
    left = tuple(name for name in names if not kinds[name] & set(hold))
    if not left:
        raise RunFailed(
            "The posterior requires at least one weight; method.weights and method.hold hold all of them at MAP. "
            "Remove a kind from method.hold."
        )
    return Basis(left, described, treatment, tuple(notes))


def last_layer_names(network: Network, x: Tensor) -> tuple[str, ...]:
    """The parameters of the linear layer whose outputs are the network's.

    Raises:
        RunFailed: there is no such layer, or it shares weights with another one.
    """
    called: list[tuple[nn.Module, Tensor]] = []
    handles = [
        m.register_forward_hook(lambda m, _, output: called.append((m, output)))
        for m in network.module.modules()
        if isinstance(m, nn.Linear)
    ]
    try:
        with torch.no_grad(), evaluation_mode(network.module), plain_attention():
            outputs = functional_call(network.module, network.tensors, (x,))
    finally:
        for handle in handles:
            handle.remove()
    ends = [m for m, output in called if output.shape == outputs.shape and torch.equal(output, outputs)]
    if not ends:
        raise RunFailed(
            "method.weights=last_layer requires a network that ends in a linear layer, which this one does not. Use "
            "method.weights=all."
        )
    place = next(n for n, m in network.module.named_modules() if m is ends[-1])
    prefix = f"{place}." if place else ""
    names = tuple(f"{prefix}{n}" for n, _ in ends[-1].named_parameters())
    if not set(names) <= set(network.parameters):
        raise RunFailed(
            f"method.weights=last_layer requires a last layer with its own weights; {place} shares them with another "
            "layer. Use method.weights=all."
        )
    return names
