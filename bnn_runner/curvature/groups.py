"""Groups of parameter tensors that share a block of the curvature, and one prior precision."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from bnn_runner.curvature.jacobian_forms import DenseJacobian, OuterProductJacobian, TensorJacobian


@dataclass(frozen=True)
class Group:
    """Tensors that are neighbours in the basis, by name.

    homogeneous: a weight [o, d] and its bias [o] as one matrix [o, d + 1] that acts on inputs with an
    appended one, so that the pair has its own Kronecker factors.
    """

    name: str
    members: tuple[str, ...]
    homogeneous: bool = False

    def jacobian(self, tensors: Mapping[str, TensorJacobian]) -> TensorJacobian:
        """The group's Jacobian, in the group's own order of weights."""
        first = tensors[self.members[0]]
        if len(self.members) == 1:
            return first
        if self.homogeneous:
            assert isinstance(first, OuterProductJacobian)
            inputs = first.inputs
            return OuterProductJacobian(torch.cat([inputs, torch.ones_like(inputs[:, :1])], dim=1), first.grads)
        return DenseJacobian(torch.cat([tensors[name].dense() for name in self.members], dim=-1))

    def packed(self, values: Tensor, sizes: Mapping[str, int]) -> Tensor:
        """[S, P_g] from the order of its tensors to the group's order; `unpacked` is the inverse."""
        if not self.homogeneous:
            return values
        outputs = sizes[self.members[1]]
        matrix = values[:, :-outputs].reshape(len(values), outputs, -1)
        return torch.cat([matrix, values[:, -outputs:].unsqueeze(-1)], dim=-1).flatten(1)

    def unpacked(self, values: Tensor, sizes: Mapping[str, int]) -> Tensor:
        """[S, P_g] from the group's order to the order of its tensors, one after the other."""
        if not self.homogeneous:
            return values
        outputs = sizes[self.members[1]]
        matrix = values.reshape(len(values), outputs, -1)
        return torch.cat([matrix[..., :-1].flatten(1), matrix[..., -1]], dim=1)

    def size(self, sizes: Mapping[str, int]) -> int:
        return sum(sizes[name] for name in self.members)


def each_tensor(names: Sequence[str]) -> tuple[Group, ...]:
    """One group for each tensor."""
    return tuple(Group(name, (name,)) for name in names)


def each_layer(names: Sequence[str]) -> tuple[Group, ...]:
    """One group for the tensors that one module owns."""
    members: dict[str, list[str]] = {}
    for name in names:
        members.setdefault(name.rpartition(".")[0], []).append(name)
    return tuple(Group(owner or own[0], tuple(own)) for owner, own in members.items())


def with_joint_biases(names: Sequence[str], matrices: Sequence[str]) -> tuple[Group, ...]:
    """One group for each tensor, except that each weight of `matrices` is grouped with its bias, if it has one."""
    groups = []
    for group in each_layer(names):
        pair = tuple(f"{group.name}.{kind}" for kind in ("weight", "bias"))
        if group.members == pair and pair[0] in matrices:
            groups.append(Group(group.name, pair, homogeneous=True))
        else:
            groups += each_tensor(group.members)
    return tuple(groups)
