"""Single products with the Jacobian, J v and Jᵀu, for a few passes through the network, independent of K."""

from __future__ import annotations

import warnings

import torch
from torch import Tensor
from torch.func import functional_call, jvp

from bnn_runner.curvature.jacobians import Jacobians
from bnn_runner.runtime.memory import out_of_memory
from bnn_runner.runtime.torch_state import evaluation_mode, plain_attention


class Differentiated:
    """The outputs at x [B, ...] with their graph in the tensors of the basis, in evaluation mode.

    Jᵀu takes one backward pass. J v is a forward derivative, at twice the cost of evaluating the network. Where an
    operation has no forward-mode rule, J v takes two backward passes: u ↦ Jᵀu is linear, so the derivative of vᵀJᵀu in
    u is J v.
    """

    def __init__(self, jacobians: Jacobians, x: Tensor) -> None:
        network, self._jacobians, self._x = jacobians.network, jacobians, x
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
        if self._jacobians.forward_mode:
            try:
                return self._forward(vector.to(self._outputs))
            except torch.OutOfMemoryError:
                raise
            except (RuntimeError, NotImplementedError) as error:
                if out_of_memory(error):
                    raise
                self._jacobians.forward_mode = False
        return self._reverse(vector)

    def _forward(self, vector: Tensor) -> Tensor:
        network, jacobians = self._jacobians.network, self._jacobians
        tensors = {n: t.detach() for n, t in network.tensors.items()}
        chosen = {n: tensors.pop(n) for n in jacobians.names}
        directions = {}
        for name, part in zip(jacobians.names, vector.split(list(jacobians.sizes().values())), strict=True):
            if name in jacobians.chosen:
                where = jacobians.chosen[name].to(part.device)
                part = part.new_zeros(chosen[name].numel()).index_copy(0, where, part)
            directions[name] = part.view_as(chosen[name])

        def outputs(moved: dict[str, Tensor]) -> Tensor:
            made: Tensor = functional_call(network.module, tensors | moved, (self._x,))
            return made

        with torch.no_grad(), evaluation_mode(network.module), plain_attention(), warnings.catch_warnings():
            # The first forward derivative imports deprecated parts of PyTorch.
            warnings.filterwarnings("ignore", message=".*torch.jit", category=FutureWarning)
            warnings.filterwarnings("ignore", message=".*torch.jit", category=DeprecationWarning)
            found = jvp(outputs, (chosen,), (directions,))[1]
        assert isinstance(found, Tensor)
        return found

    def _reverse(self, vector: Tensor) -> Tensor:
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
