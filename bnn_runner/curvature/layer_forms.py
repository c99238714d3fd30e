"""Inputs and output derivatives of layers, in the shapes in which a Jacobian is kept as a pair of both.

Letters: B points, C directions of the outputs, T positions, a weight of o × d numbers.
"""

from __future__ import annotations

from torch import Tensor, nn
from torch.func import functional_call

from bnn_runner.curvature.conv_patches import Patches, patches_of
from bnn_runner.runtime.torch_state import evaluation_mode

NORMS = (nn.modules.batchnorm._BatchNorm, nn.LayerNorm, nn.GroupNorm)


def has_structure(owner: nn.Module) -> bool:
    """Whether the layer's class has a structured Jacobian (the first batch verifies it)."""
    if isinstance(owner, nn.Conv2d):
        return owner.groups == 1 and owner.padding_mode == "zeros"
    if isinstance(owner, nn.Embedding):
        plain = owner.padding_idx is None and owner.max_norm is None
        return plain and not owner.scale_grad_by_freq and not owner.sparse
    return isinstance(owner, (nn.Linear, *NORMS))


def read_by(owner: nn.Module, inputs: Tensor) -> Tensor | Patches:
    """The inputs of a linear or convolution layer at each position, [B, d, T]."""
    if isinstance(owner, nn.Conv2d):
        return patches_of(owner, inputs)
    return inputs.reshape(len(inputs), -1, inputs.shape[-1]).mT


def by_position(owner: nn.Module, grads: Tensor) -> Tensor:
    """Derivatives [B, C, o, T] with respect to the output of a linear or convolution layer."""
    if isinstance(owner, nn.Conv2d):
        return grads.flatten(3)
    return grads.reshape(*grads.shape[:2], -1, grads.shape[-1]).mT


def norm_jacobian(owner: nn.Module, kind: str, inputs: Tensor, grads: Tensor, buffers: dict[str, Tensor]) -> Tensor:
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
