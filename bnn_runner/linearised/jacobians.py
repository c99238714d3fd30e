"""Jacobians of a network, one parameter tensor at a time, from one forward and K backward passes.

For a linear map inside the network, z = W a + b at T positions, the Jacobian of the outputs with
respect to W is Σ_t g_t a_tᵀ, with a the layer's input and g the outputs' derivatives with respect
to z. So it is kept as the pair (a, g): KFAC, closed-form variances and linearised draws all work
on the pair, and the dense Jacobian [B, C, P] is formed only where it is the cheaper side.

Backward passes sum over the batch, which is right because a network in evaluation mode treats
points independently; the contract tests check that.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call, jacrev, vmap

from bnn_runner.base import Network
from bnn_runner.errors import RunFailed
from bnn_runner.modes import evaluation_mode

Root = Callable[[Tensor], Tensor]
FLOATS_AT_ONCE = 8_000_000
"""Numbers in one intermediate array: more would not fit the caches, and fresh memory costs more than the arithmetic."""

_NORMS = (nn.modules.batchnorm._BatchNorm, nn.LayerNorm, nn.GroupNorm)


@dataclass(frozen=True)
class Factored:
    """Jacobian of C outputs at B points with respect to a weight matrix: Σ_t g_t a_tᵀ.

    `inputs` a is [B, d, T], `grads` g is [B, C, o, T]; the weight has o × d numbers.
    """

    inputs: Tensor
    grads: Tensor

    @property
    def size(self) -> int:
        """Weights of the tensor."""
        return self.grads.shape[2] * self.inputs.shape[1]

    def dense(self) -> Tensor:
        """[B, C, o·d]."""
        b, c, o, t = self.grads.shape
        if t == 1:
            product = self.grads * self.inputs.reshape(b, 1, 1, -1)
        else:
            product = torch.bmm(self.grads.reshape(b, c * o, t), self.inputs.mT)
        return product.reshape(b, c, -1)

    def apply(self, deltas: Tensor) -> Tensor:
        """J δ_s for deltas [S, o·d]: [B, C, S], by whichever order of products needs less work."""
        b, c, o, t = self.grads.shape
        d, s = self.inputs.shape[1], len(deltas)
        through_activations = s * t * o * (d + c)
        through_jacobian = c * o * d * (t + s)
        if through_jacobian < through_activations:
            return (self.dense().reshape(b * c, -1) @ deltas.T).reshape(b, c, s)
        out = deltas.new_empty(b, c, s)
        rows = self.inputs.mT.reshape(b * t, d)
        grads = self.grads.transpose(2, 3).reshape(b, c, t * o)
        step = max(1, FLOATS_AT_ONCE // (b * t * o))
        for i in range(0, s, step):
            part = deltas[i : i + step].reshape(-1, o, d)
            moved = rows @ part.reshape(-1, d).T  # [B·T, S·o]
            moved = moved.reshape(b, t, len(part), o).transpose(2, 3).reshape(b, t * o, len(part))
            out[..., i : i + step] = torch.bmm(grads, moved)
        return out

    def pull(self, values: Tensor) -> Tensor:
        """Σ_b J_bᵀ u_b for values [B, C]: [o·d]."""
        grads = torch.einsum("bcot,bc->bot", self.grads, values)
        return torch.einsum("bot,bdt->od", grads, self.inputs).reshape(-1)


@dataclass(frozen=True)
class Dense:
    """Jacobian of C outputs at B points with respect to any tensor, [B, C, P_t]."""

    values: Tensor

    @property
    def size(self) -> int:
        """Weights of the tensor."""
        return self.values.shape[-1]

    def dense(self) -> Tensor:
        return self.values

    def apply(self, deltas: Tensor) -> Tensor:
        return self.values @ deltas.T

    def pull(self, values: Tensor) -> Tensor:
        return torch.einsum("bcp,bc->p", self.values, values)


TensorJacobian = Factored | Dense


@dataclass(frozen=True)
class BatchJacobians:
    """Outputs [B, K] and, for each parameter tensor of the basis, the Jacobian of C directions of them."""

    outputs: Tensor
    tensors: dict[str, TensorJacobian]

    def dense(self) -> Tensor:
        """Every tensor side by side, [B, C, P]."""
        return torch.cat([j.dense() for j in self.tensors.values()], dim=-1)

    def push(self, delta: Tensor) -> Tensor:
        """J δ for δ [P], every tensor one after the other: [B, C]."""
        sizes = [j.size for j in self.tensors.values()]
        parts = zip(self.tensors.values(), delta.split(sizes), strict=True)
        return torch.stack([j.apply(part.unsqueeze(0)) for j, part in parts]).sum(0).squeeze(-1)

    def pull(self, values: Tensor) -> Tensor:
        """Σ_b J_bᵀ u_b for values [B, C], every tensor one after the other: [P]."""
        return torch.cat([j.pull(values) for j in self.tensors.values()])


@dataclass
class _Visit:
    """One call of a parametrised module: its input and its output, which the graph runs through."""

    inputs: Tensor
    output: Tensor


class Jacobians:
    """Jacobians of a network with respect to the parameter tensors `names`, at its trained weights.

    Linear and convolution layers (ungrouped, zero padding) are handled in factored form; batch-,
    layer- and groupnorm from their normalised input; any other module that owns parameters by
    reverse-mode derivatives of each point. A tensor whose module the forward pass never calls
    through is handled that last way too, so none is skipped in silence.
    """

    def __init__(self, network: Network, names: tuple[str, ...] | None = None) -> None:
        self.network = network
        self.names = tuple(network.parameters) if names is None else names
        self._owners: dict[str, nn.Module] = {}
        self._plain: set[str] = set()
        self._positions: dict[str, int] = {}
        for name in self.names:
            owner = network.module.get_submodule(name.rpartition(".")[0])
            self._owners[name] = owner
            simple_conv = isinstance(owner, nn.Conv2d) and owner.groups == 1 and owner.padding_mode == "zeros"
            if not (isinstance(owner, (nn.Linear, *_NORMS)) or simple_conv):
                self._plain.add(name)

    def state(self) -> dict[str, Any]:
        """What makes the same object again, with what it has learned of its layers (`posterior_store.Saves`)."""
        learned = {"plain": sorted(self._plain), "positions": dict(self._positions)}
        return {"network": self.network, "names": self.names, **learned}

    @classmethod
    def from_state(cls, state: Mapping[str, Any]) -> Jacobians:
        made = cls(state["network"], state["names"])
        made._plain, made._positions = set(state["plain"]), dict(state["positions"])
        return made

    def rule(self, name: str) -> str:
        """How a tensor's Jacobian is made: matrix (factored weight), bias, norm, or general."""
        if name in self._plain:
            return "general"
        owner = self._owners[name]
        if isinstance(owner, _NORMS):
            return "norm"
        return "matrix" if name.endswith("weight") else "bias"

    def sizes(self) -> dict[str, int]:
        """Numbers in each tensor of the basis."""
        return {name: self.network.parameters[name].numel() for name in self.names}

    def learn_shapes(self, x: Tensor) -> None:
        """One point through the network, for the number of positions of each layer (batch sizes depend on it)."""
        self(x[:1])

    def batch_size(self, directions: int, largest: int = 512) -> int:
        """Points at once so that the largest array of a batch stays within `FLOATS_AT_ONCE`."""
        return max(1, min(largest, FLOATS_AT_ONCE // max(1, self._floats_per_point(directions))))

    def _floats_per_point(self, directions: int) -> int:
        """Numbers a point needs in the widest layer: its Jacobian (its factors, at one position) and its patches."""
        widest = 1
        for name, size in self.sizes().items():
            positions = self._positions.get(name, 0)
            rule = self.rule(name)
            if rule == "matrix" and positions:
                outputs = self.network.parameters[name].shape[0]
                dense = size if positions > 1 else outputs
                widest = max(widest, directions * dense, directions * outputs * positions, size // outputs * positions)
            else:
                widest = max(widest, directions * size * max(positions, 1))
        return widest

    def __call__(self, x: Tensor, root: Root | None = None) -> BatchJacobians:
        """Jacobians at x [B, ...] of the K outputs, or of Rᵀ outputs with R = root(outputs) [B, K, C]."""
        visits: dict[nn.Module, list[_Visit]] = {}
        handles = [
            owner.register_forward_hook(_recorder(visits))
            for owner in {self._owners[n] for n in self.names if n not in self._plain}
        ]
        try:
            with torch.enable_grad(), evaluation_mode(self.network.module):
                tensors = {n: t.detach() for n, t in self.network.tensors.items()}
                outputs = functional_call(self.network.module, tensors, (x,))
        finally:
            for handle in handles:
                handle.remove()
        batch, num_outputs = outputs.shape
        values = outputs.detach()
        root_values = (
            torch.eye(num_outputs, dtype=values.dtype, device=x.device).expand(batch, -1, -1)
            if root is None
            else root(values)
        )
        grads = self._backward(outputs, visits, root_values)
        made: dict[str, TensorJacobian] = {}
        general: list[str] = []
        for name in self.names:
            calls = visits.get(self._owners[name], []) if name not in self._plain else []
            if not calls:
                general.append(name)
                continue
            made[name] = self._tensor(name, calls, [grads[id(v)] for v in calls])
        if general:
            made |= self._general(general, x, root_values)
        return BatchJacobians(values, {name: made[name] for name in self.names})

    def _backward(self, outputs: Tensor, visits: dict[nn.Module, list[_Visit]], root: Tensor) -> dict[int, Tensor]:
        """Derivatives [B, C, ...] of the C directions with respect to every visited output."""
        calls = [v for many in visits.values() for v in many]
        rows: list[list[Tensor]] = [[] for _ in calls]
        directions = root.shape[-1]
        for c in range(directions if calls else 0):
            grads = torch.autograd.grad(
                outputs, [v.output for v in calls], root[..., c], retain_graph=c < directions - 1, allow_unused=True
            )
            for row, grad, call in zip(rows, grads, calls, strict=True):
                row.append(torch.zeros_like(call.output) if grad is None else grad)
        return {id(v): torch.stack(row, dim=1) for v, row in zip(calls, rows, strict=True)}

    def _tensor(self, name: str, calls: list[_Visit], grads: list[Tensor]) -> TensorJacobian:
        owner, kind = self._owners[name], name.rpartition(".")[2]
        if isinstance(owner, _NORMS):
            parts = [
                _norm_jacobian(owner, kind, v.inputs, g, self._buffers_of(name))
                for v, g in zip(calls, grads, strict=True)
            ]
            self._positions[name] = 1
            return Dense(sum(parts[1:], parts[0]))
        pairs = [_positions(owner, v.inputs, g) for v, g in zip(calls, grads, strict=True)]
        self._positions[name] = sum(a.shape[-1] for a, _ in pairs)
        if kind == "bias":
            parts = [g.sum(-1) for _, g in pairs]
            return Dense(sum(parts[1:], parts[0]))
        if len(pairs) == 1:
            return Factored(*pairs[0])
        return Factored(torch.cat([a for a, _ in pairs], dim=-1), torch.cat([g for _, g in pairs], dim=-1))

    def _buffers_of(self, name: str) -> dict[str, Tensor]:
        prefix = name.rpartition(".")[0] + "."
        return {n.removeprefix(prefix): t for n, t in self.network.buffers.items() if n.startswith(prefix)}

    def _general(self, names: list[str], x: Tensor, root: Tensor) -> dict[str, TensorJacobian]:
        chosen = {n: self.network.parameters[n] for n in names}
        rest = {n: t for n, t in self.network.tensors.items() if n not in chosen}

        def one(parameters: dict[str, Tensor], point: Tensor, r: Tensor) -> Tensor:
            out = functional_call(self.network.module, parameters | rest, (point.unsqueeze(0),))
            return r.T @ out.squeeze(0)

        with evaluation_mode(self.network.module):
            result: dict[str, Tensor] = vmap(jacrev(one), in_dims=(None, 0, 0))(chosen, x, root)
        return {n: Dense(j.detach().flatten(2)) for n, j in result.items()}


def _recorder(visits: dict[nn.Module, list[_Visit]]) -> Callable[..., Tensor]:
    def record(module: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> Tensor:
        if not output.requires_grad:
            output.requires_grad_()
        visits.setdefault(module, []).append(_Visit(inputs[0].detach(), output))
        # A later in-place operation (ReLU(inplace=True)) would re-base the recorded tensor's graph.
        return output.clone()

    return record


def _positions(owner: nn.Module, inputs: Tensor, grads: Tensor) -> tuple[Tensor, Tensor]:
    """Inputs [B, d, T] and derivatives [B, C, o, T] of a linear or convolution layer, position by position."""
    if isinstance(owner, nn.Conv2d):
        if isinstance(owner.padding, str):
            raise RunFailed(
                "the curvature of a convolution with string padding is not implemented. Give the padding as numbers."
            )
        patches = nn.functional.unfold(inputs, owner.kernel_size, owner.dilation, owner.padding, owner.stride)
        return patches, grads.flatten(3)
    batch, directions = grads.shape[:2]
    positions = math.prod(inputs.shape[1:-1])
    flat_grads = grads.reshape(batch, directions, positions, -1)
    return inputs.reshape(batch, positions, -1).mT, flat_grads.mT


def _norm_jacobian(owner: nn.Module, kind: str, inputs: Tensor, grads: Tensor, buffers: dict[str, Tensor]) -> Tensor:
    """Jacobian [B, C, P_t] of a norm layer's scale or shift."""
    if kind == "weight":
        shape = {n: p.shape for n, p in owner.named_parameters()}
        unit = {"weight": inputs.new_ones(shape["weight"])}
        if "bias" in shape:
            unit["bias"] = inputs.new_zeros(shape["bias"])
        with evaluation_mode(owner):
            grads = grads * functional_call(owner, unit | buffers, (inputs,)).detach().unsqueeze(1)
    if isinstance(owner, nn.LayerNorm):
        keep = len(owner.normalized_shape)
        middle = range(2, grads.dim() - keep)
        return (grads.sum(tuple(middle)) if len(middle) else grads).flatten(2)
    return grads.flatten(3).sum(-1) if grads.dim() > 3 else grads
