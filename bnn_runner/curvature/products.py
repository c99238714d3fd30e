"""Single products with the Jacobian, J v and Jᵀu, for a few passes through the network, independent of K."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.func import functional_call

from bnn_runner.curvature.jacobians import Jacobians
from bnn_runner.runtime.torch_state import evaluation_mode, plain_attention


class Differentiated:
    """The outputs at x [B, ...] with their graph in the tensors of the basis, in evaluation mode.

    Jᵀu takes one backward pass, J v two: u ↦ Jᵀu is linear, so the derivative of vᵀJᵀu in u is J v. Only
    reverse-mode rules are needed, which every trainable operation has.
    """

    def __init__(self, jacobians: Jacobians, x: Tensor) -> None:
        network, self._jacobians = jacobians.network, jacobians
        tensors = {n: t.detach() for n, t in network.tensors.items()}
        self._tensors = [tensors[n].requires_grad_() for n in jacobians.names]
        with torch.enable_grad(), evaluation_mode(network.module), plain_attention():
            self._outputs = functional_call(network.module, tensors, (x,))

    @property
    def outputs(self) -> Tensor:
        """f(x, w*), [B, K]."""
        return self._outputs.detach()

    def jvp(self, vector: Tensor) -> Tensor:
        """J v for v [P], every tensor one after the other: [B, C]."""
        parts = vector.to(self._outputs).split(list(self._jacobians.sizes().values()))
        with torch.enable_grad():
            probe = torch.zeros_like(self._outputs, requires_grad=True)
            grads = self._vjp_by_tensor(probe, create_graph=True)
            total = torch.stack([g @ part for g, part in zip(grads, parts, strict=True)]).sum()
            return torch.autograd.grad(total, probe, retain_graph=True)[0]

    def vjp(self, values: Tensor) -> Tensor:
        """Σ_b J_bᵀ u_b for values [B, C]: [P]."""
        with torch.enable_grad():
            return torch.cat(self._vjp_by_tensor(values.to(self._outputs), create_graph=False))

    def _vjp_by_tensor(self, values: Tensor, create_graph: bool) -> list[Tensor]:
        """Jᵀu of each tensor, for its weights in the basis: [P_t]."""
        grads = torch.autograd.grad(
            self._outputs, self._tensors, values, retain_graph=True, create_graph=create_graph, materialize_grads=True
        )
        return [self._jacobians.part(n, g) for n, g in zip(self._jacobians.names, grads, strict=True)]
