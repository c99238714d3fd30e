"""Jacobians of a network, one parameter tensor at a time, from one forward and K backward passes.

For a linear map inside the network, z = W a + b at T positions, the Jacobian of the outputs with
respect to W is Σ_t g_t a_tᵀ, with a the layer's input and g the outputs' derivatives with respect
to z. So it is kept as the pair (a, g): KFAC, closed-form variances and linearised draws all use
the pair, and the dense Jacobian [B, C, P] is formed only where it is cheaper.

A product J v is computed from these pairs, by reverse mode alone, so that no operation of a network needs a
forward-mode rule.

Backward passes sum over the batch, which is right where a network in evaluation mode treats points
independently. That, and every tensor's structured form, is compared with plain reverse-mode
derivatives at the first batch, and the reads of every weight are counted there (`models.weight_reads`):
weights used outside their module (tied, standardised, read by another layer, even behind a gate that is
closed at these points) would otherwise silently get a wrong or zero curvature.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.func import functional_call, vmap

from bnn_runner.base import Network
from bnn_runner.curvature.jacobian_forms import (
    FLOATS_AT_ONCE,
    DenseJacobian,
    EmbeddingJacobian,
    OuterProductJacobian,
    TensorJacobian,
    entries,
    forms_dense,
)
from bnn_runner.curvature.layer_forms import NORMS, by_position, has_structure, norm_jacobian, read_by
from bnn_runner.curvature.psd import Repairs
from bnn_runner.errors import RunFailed
from bnn_runner.models.weight_reads import weight_reads
from bnn_runner.rng import generator
from bnn_runner.runtime.memory import memory_limit
from bnn_runner.runtime.torch_state import evaluation_mode, plain_attention, true_float32

Root = Callable[[Tensor], Tensor]
CHECKED_POINTS = 2
"""Points of the first batch at which the structured forms are compared with reverse-mode derivatives."""
MOST_HALVINGS = 9
"""After this many, the largest batch is one point."""
BATCH_SHARE = 0.5
"""Of the memory limit, for everything that a batch holds; matrices of the fit take the rest."""


@dataclass(frozen=True)
class BatchJacobians:
    """Outputs [B, K], and for each parameter tensor of the basis the Jacobian of C directions of the outputs."""

    outputs: Tensor
    tensors: dict[str, TensorJacobian]

    def dense(self) -> Tensor:
        """All tensors concatenated, [B, C, P]."""
        return torch.cat([j.dense() for j in self.tensors.values()], dim=-1)

    def jvp(self, delta: Tensor) -> Tensor:
        """J δ for δ [P], all tensors concatenated: [B, C]."""
        sizes = [j.size for j in self.tensors.values()]
        parts = zip(self.tensors.values(), delta.split(sizes), strict=True)
        return torch.stack([j.apply(part.unsqueeze(0)) for j, part in parts]).sum(0).squeeze(-1)

    def vjp(self, values: Tensor) -> Tensor:
        """Σ_b J_bᵀ u_b for values [B, C, S], all tensors concatenated: [S, P]."""
        return torch.cat([j.vjp(values) for j in self.tensors.values()], dim=1)


@dataclass
class _Visit:
    """One call of a parametrised module: its input and its output, which is part of the graph."""

    inputs: Tensor
    output: Tensor


class Jacobians:
    """Jacobians of a network with respect to the parameter tensors `names`, at its trained weights.

    Linear and convolution layers (ungrouped, zero padding) are handled in factored form, embeddings
    by the rows that were looked up, batch-, layer- and groupnorm by their normalised input, and any
    other parameter by reverse-mode derivatives of each point. The latter also holds for one whose structured form is
    not its derivative (which the first batch shows), or whose module the forward pass never calls.

    Args:
        network: trained.
        names: tensors of the basis; None is all.
        chosen: places [n] in the flattened tensor of the weights in the basis, where they are not all of a tensor.

    Raises:
        RunFailed: at the first batch, if outputs at a point depend on the rest of the batch or differ from call to
            call.
    """

    def __init__(
        self, network: Network, names: tuple[str, ...] | None = None, chosen: Mapping[str, Tensor] | None = None
    ) -> None:
        self.network = network
        self.names = tuple(network.parameters) if names is None else names
        self.chosen: Mapping[str, Tensor] = chosen or {}
        self._owners: dict[str, nn.Module] = {}
        self._plain: set[str] = set()
        self._positions: dict[str, int] = {}
        self._checked = False
        self._loops = False
        self.forward_mode = True  # until an operation has no such rule
        self._halvings = 0
        for name in self.names:
            place, _, kind = name.rpartition(".")
            self._owners[name] = network.module.get_submodule(place)
            if kind not in ("weight", "bias") or not has_structure(self._owners[name]):
                self._plain.add(name)

    def state(self) -> dict[str, Any]:
        """What gives the same object again, with what it has learned of its layers (see `posteriors.io.Saves`)."""
        learned = {"plain": sorted(self._plain), "positions": dict(self._positions)}
        return {"network": self.network, "names": self.names, "chosen": dict(self.chosen), **learned}

    @classmethod
    def from_state(cls, state: Mapping[str, Any]) -> Jacobians:
        made = cls(state["network"], state["names"], state["chosen"])
        made._plain, made._positions = set(state["plain"]), dict(state["positions"])
        made._checked = True  # a curvature was fitted under these rules: another batch must not change them
        return made

    def of(self, names: tuple[str, ...]) -> Jacobians:
        """The Jacobians of some of the tensors, in chunks as small as these have become."""
        made = Jacobians(self.network, names, self.chosen)
        made._halvings, made._checked, made._loops = self._halvings, self._checked, self._loops
        made._plain |= self._plain & set(names)
        made._positions = {n: p for n, p in self._positions.items() if n in names}
        return made

    def rule(self, name: str) -> str:
        """How a tensor is treated: matrix (factored weight), bias, norm, or general; final after the first batch."""
        owner = self._owners[name]
        if name in self._plain or isinstance(owner, nn.Embedding):
            return "general"
        if isinstance(owner, NORMS):
            return "norm"
        return "matrix" if name.endswith("weight") else "bias"

    def positions(self, name: str) -> int:
        """Positions T at which a layer's weight is used; 0 before the first batch."""
        return self._positions.get(name, 0)

    def sizes(self) -> dict[str, int]:
        """Number of weights of each tensor that are in the basis."""
        whole = self.network.parameters
        return {name: len(self.chosen[name]) if name in self.chosen else whole[name].numel() for name in self.names}

    def part(self, name: str, values: Tensor) -> Tensor:
        """The entries of `values`, of the tensor's shape, that belong to weights of the basis: [P_t]."""
        flat = values.flatten()
        return flat[self.chosen[name].to(flat.device)] if name in self.chosen else flat

    def moved(self, delta: Tensor) -> dict[str, Tensor]:
        """Parameters and buffers at w* + δ for δ [P], all tensors of the basis concatenated."""
        moved = {}
        for name, step in zip(self.names, delta.split(list(self.sizes().values())), strict=True):
            centre = self.network.parameters[name]
            index = self.chosen.get(name, torch.arange(centre.numel(), device=centre.device))
            moved[name] = centre.flatten().index_add(0, index, step.to(centre)).view_as(centre)
        return self.network.tensors | moved

    def learn_shapes(self, x: Tensor) -> None:
        """Run a few points, to learn the positions of each layer (which set batch sizes) and for the check."""
        self(x[:CHECKED_POINTS])

    def batch_size(self, directions: int, largest: int = 512, use: Literal["any", "factors"] | int = "any") -> int:
        """Points per batch: its largest array is within `FLOATS_AT_ONCE`, all of it within its share of memory.

        `use` says what the Jacobians are used for: any (the dense Jacobian of a layer may be formed), factors
        (that of a factored layer is not), or the number of draws that are multiplied by them.
        """
        widest, held = self._floats_per_point(directions, use)
        points = min(largest, FLOATS_AT_ONCE // widest, memory_limit().floats(BATCH_SHARE) / held)
        return max(1, int(points) >> self._halvings)

    def points_at_once(self, largest: int) -> int:
        """Points of a pass that holds a graph of their activations and one derivative of each, no Jacobian."""
        _, held = self._floats_per_point(1, "factors")
        return max(1, int(min(largest, memory_limit().floats(BATCH_SHARE) / held)) >> self._halvings)

    def halve(self, repairs: Repairs | None = None) -> bool:
        """Half as many points at once from now on, counted in `repairs`; False where it is one point already."""
        if repairs is not None:
            repairs["out_of_memory_halved"] += 1
        self._halvings += 1
        return self._halvings <= MOST_HALVINGS

    def _floats_per_point(self, directions: int, use: Literal["any", "factors"] | int) -> tuple[int, int]:
        """Numbers per point in the widest layer (its Jacobian or factors, its patches), and in all layers together.

        The derivatives of every layer's output exist at once, twice while they are stacked.
        """
        widest, held = 1, 0
        for name in self.names:
            size, positions = self.network.parameters[name].numel(), self._positions.get(name, 0)
            rule = self.rule(name)
            if rule == "matrix" and positions:
                outputs = self.network.parameters[name].shape[0]
                inputs = size // outputs
                dense = positions > 1 and use == "any"
                if isinstance(use, int):
                    dense = forms_dense(positions, outputs, inputs, directions, use)
                widest = max(widest, directions * outputs * positions, inputs * positions)
                widest = max(widest, directions * size) if dense else widest
                held += (2 * directions + 2) * outputs * positions
            else:
                widest = max(widest, directions * size * max(positions, 1))
        return widest, held + 2 * widest

    def __call__(self, x: Tensor, root: Root | None = None) -> BatchJacobians:
        """Jacobians at x [B, ...] of the K outputs, or of Rᵀ outputs with R = root(outputs) [B, K, C]."""
        if not self._checked:
            self._check(x[:CHECKED_POINTS])
            self._checked = True
        outputs, visits = self._visited(x)
        batch, num_outputs = outputs.shape
        values = outputs.detach()
        root_values = (
            torch.eye(num_outputs, dtype=values.dtype, device=x.device).expand(batch, -1, -1)
            if root is None
            else root(values)
        )
        made = self._all(outputs, visits, x, root_values)
        return BatchJacobians(
            values, {n: entries(j, self.chosen[n]) if n in self.chosen else j for n, j in made.items()}
        )

    def _visited(self, x: Tensor) -> tuple[Tensor, dict[nn.Module, list[_Visit]]]:
        """Outputs with their graph, and every call of the modules with structure."""
        visits: dict[nn.Module, list[_Visit]] = {}
        handles = [
            owner.register_forward_hook(_recorder(visits), with_kwargs=True)
            for owner in {self._owners[n] for n in self.names if n not in self._plain}
        ]
        try:
            with torch.enable_grad(), evaluation_mode(self.network.module), plain_attention():
                tensors = {n: t.detach() for n, t in self.network.tensors.items()}
                return functional_call(self.network.module, tensors, (x,)), visits
        finally:
            for handle in handles:
                handle.remove()

    def _all(
        self, outputs: Tensor, visits: dict[nn.Module, list[_Visit]], x: Tensor, root: Tensor
    ) -> dict[str, TensorJacobian]:
        grads = self._backward(outputs, visits, root)
        made: dict[str, TensorJacobian] = {}
        general: list[str] = []
        for name in self.names:
            calls = visits.get(self._owners[name], []) if name not in self._plain else []
            if any(len(v.inputs) != len(x) for v in calls):
                raise RunFailed(
                    f"Layer {name.rpartition('.')[0]} must get one row per point for a curvature; here it gets "
                    f"{len(calls[0].inputs)} rows for {len(x)} points, and at the first training points it did not. "
                    "Use a method without curvature, such as method=bbb_weights or method=sgld."
                )
            if not calls:
                general.append(name)
                continue
            made[name] = self._tensor(name, calls, [grads[id(v)] for v in calls])
        if general:
            made |= self._general(general, x, root)
        return {name: made[name] for name in self.names}

    def _check(self, x: Tensor) -> None:
        """Compare structured forms with reverse-mode derivatives of r_b·f(x_b), r random; others become general.

        Also check that each point alone gives the same outputs.
        """
        module, network = self.network.module, self.network
        tensors = {n: t.detach() for n, t in network.tensors.items()}
        chosen = {n: tensors[n].requires_grad_() for n in self.names}
        with true_float32(), torch.enable_grad(), evaluation_mode(module), plain_attention():
            outputs = functional_call(module, tensors, (x,))
            with torch.no_grad():
                alone = torch.cat([functional_call(module, tensors, (point,)) for point in x.split(1)])
            loose = 1e-3 if outputs.dtype != torch.float64 else 1e-8
            if outputs.dim() != 2 or not torch.allclose(outputs, alone, loose, loose * _size(outputs), equal_nan=True):
                raise RunFailed(
                    "In evaluation mode, a network's outputs at a point must not depend on the rest of the batch or "
                    "change from call to call; this network's do, so it has no curvature. Remove batch statistics and "
                    "random layers from its evaluation mode."
                )
            directions = torch.randn(outputs.shape, generator=generator(0, "jacobian check"), dtype=torch.float64)
            directions = directions.to(outputs)
            rows: dict[str, list[Tensor]] = {n: [] for n in chosen}
            for b in range(len(x)):
                found = torch.autograd.grad(
                    outputs[b], list(chosen.values()), directions[b], retain_graph=True, allow_unused=True
                )
                for (n, t), g in zip(chosen.items(), found, strict=True):
                    rows[n].append((torch.zeros_like(t) if g is None else g).flatten())
            reference = {n: torch.stack(row).unsqueeze(1) for n, row in rows.items()}  # [B, 1, P_t]
            largest = max((_size(g) for g in reference.values()), key=lambda n: math.inf if math.isnan(n) else n)
            if not math.isfinite(largest):
                return  # nothing to compare with; the fit names the tensor
            self._plain |= self._read_elsewhere(x)
            again, visits = self._visited(x)
            self._plain |= {n for n in self.names if self._owners[n] not in visits}
            structured = {n: visits[self._owners[n]] for n in self.names if n not in self._plain}
            grads = self._backward(again, visits, directions.unsqueeze(-1))
        for name, calls in structured.items():
            found_here = self._tensor(name, calls, [grads[id(v)] for v in calls]).dense()
            same_shape = found_here.shape == reference[name].shape
            error = _size(found_here - reference[name]) if same_shape else math.inf
            # A derivative that cancels (a bias before a norm) is only rounding: it is compared loosely.
            if not error <= loose * _size(reference[name]) + 1e-3 * loose * largest:
                self._plain.add(name)
                self._positions.pop(name, None)

    def _read_elsewhere(self, x: Tensor) -> set[str]:
        """Tensors whose layer's calls are not all that reads them, or do not compute what the layer's class does."""
        reads = weight_reads(self.network.module, self.network.tensors, x, training=False)
        places = {id(m): n for n, m in self.network.module.named_modules()}
        found = {n: reads[places[id(self._owners[n])]] for n in self.names if n not in self._plain}
        return {n for n, layer in found.items() if n in layer.shared or not (layer.plain and layer.whole)}

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
        if isinstance(owner, NORMS):
            parts = [
                norm_jacobian(owner, kind, v.inputs, g, self._buffers_of(name))
                for v, g in zip(calls, grads, strict=True)
            ]
            self._positions[name] = 1
            return DenseJacobian(sum(parts[1:], parts[0]))
        if isinstance(owner, nn.Embedding):
            ids = torch.cat([v.inputs.reshape(len(v.inputs), -1) for v in calls], dim=1)
            rows = torch.cat([g.reshape(*g.shape[:2], -1, g.shape[-1]) for g in grads], dim=2)
            return EmbeddingJacobian(ids, rows, owner.num_embeddings)
        if kind == "bias":
            sums = [by_position(owner, g) for g in grads]
            self._positions[name] = sum(g.shape[-1] for g in sums)
            parts = [g.sum(-1) for g in sums]
            return DenseJacobian(sum(parts[1:], parts[0]))
        pairs = [
            OuterProductJacobian(read_by(owner, v.inputs), by_position(owner, g))
            for v, g in zip(calls, grads, strict=True)
        ]
        self._positions[name] = sum(j.read.shape[-1] for j in pairs)
        if len(pairs) == 1:
            return pairs[0]
        return OuterProductJacobian(
            torch.cat([j.inputs for j in pairs], dim=-1), torch.cat([j.grads for j in pairs], dim=-1)
        )

    def _buffers_of(self, name: str) -> dict[str, Tensor]:
        prefix = name.rpartition(".")[0] + "."
        return {n.removeprefix(prefix): t for n, t in self.network.buffers.items() if n.startswith(prefix)}

    def _general(self, names: list[str], x: Tensor, root: Tensor) -> dict[str, TensorJacobian]:
        """A copy of these parameters for each point, then one backward pass per direction.

        Points are vmapped; a network that does not support this (recurrent layers have no batching rule, Python
        branches depend on values, operations write in place) takes them one after the other.
        """
        module = self.network.module
        rest = {n: t.detach() for n, t in self.network.tensors.items() if n not in names}

        def one(parameters: dict[str, Tensor], point: Tensor) -> Tensor:
            return functional_call(module, parameters | rest, (point.unsqueeze(0),)).squeeze(0)

        with torch.enable_grad(), evaluation_mode(module), plain_attention():
            copies = {}
            for name in names:
                parameter = self.network.parameters[name].detach()
                copies[name] = parameter.expand(len(x), *parameter.shape).clone().requires_grad_()
            outputs = self._outputs_alone(one, copies, x)
            if not outputs.requires_grad:  # nothing uses these parameters
                zeros = {n: x.new_zeros(len(x), root.shape[-1], c[0].numel(), dtype=c.dtype) for n, c in copies.items()}
                return {n: DenseJacobian(z) for n, z in zeros.items()}
            rows: dict[str, list[Tensor]] = {name: [] for name in names}
            for c in range(root.shape[-1]):
                grads = torch.autograd.grad(
                    outputs, list(copies.values()), root[..., c], retain_graph=c < root.shape[-1] - 1, allow_unused=True
                )
                for (name, copy), grad in zip(copies.items(), grads, strict=True):
                    rows[name].append((torch.zeros_like(copy) if grad is None else grad).reshape(len(x), -1))
        return {name: DenseJacobian(torch.stack(row, dim=1)) for name, row in rows.items()}

    def _outputs_alone(self, one: Callable[..., Tensor], copies: dict[str, Tensor], x: Tensor) -> Tensor:
        """Outputs [B, K], point b under its own copy b of the parameters."""
        if not self._loops:
            try:
                with warnings.catch_warnings():  # an operation is taken point by point, as a loop would
                    warnings.filterwarnings("ignore", message="There is a performance drop")
                    return vmap(one)(copies, x)
            except torch.OutOfMemoryError:
                raise
            except (RuntimeError, ValueError):
                self._loops = True
        return torch.stack([one({n: c[b] for n, c in copies.items()}, x[b]) for b in range(len(x))])


def _size(values: Tensor) -> float:
    """The norm; 0 of an empty tensor."""
    return float(values.detach().norm())


def _recorder(visits: dict[nn.Module, list[_Visit]]) -> Callable[..., Tensor]:
    def record(module: nn.Module, args: tuple[Tensor, ...], kwargs: Mapping[str, Tensor], output: Tensor) -> Tensor:
        if not output.requires_grad:
            output.requires_grad_()
        visits.setdefault(module, []).append(_Visit((*args, *kwargs.values())[0].detach(), output))
        # A later in-place operation (ReLU(inplace=True)) would re-base the recorded tensor's graph.
        return output.clone()

    return record
