"""Noise for the forward pass of a factorised Gaussian over weights: three estimators of E_q log p(y | x, w).

The network runs at the means μ of its matrices, and hooks add the noise to each layer's output, so that any
architecture is supported:

- local: local reparametrisation (Kingma et al. 2015): outputs ~ N(x μᵀ, x² (σ²)ᵀ), drawn for each point
  separately. Exact for a linear layer at one position; over the positions of a convolution (or of a
  sequence) the noise is drawn as if each had its own weights, as is common.
- flipout (Wen et al. 2018): one perturbation ΔW = σ ε per step, ((x ∘ s) ΔWᵀ) ∘ r with random signs s, r for
  each point; exact for convolutions too (signs by channel).
- weights: one w = μ + σ ε per step, shared by the batch; it needs no hook.

Tensors of other modules, and of layers that a pass does not call exactly once or whose weight is read elsewhere
too, are always drawn as weights, which is exact for any use of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from bnn_runner.errors import RunFailed
from bnn_runner.models.weight_reads import weight_reads

Estimator = Literal["local", "flipout", "weights"]
Layer = nn.Linear | nn.Conv2d
_TINY = 1e-20
"""Added to the variance of a layer's outputs: the square root has no derivative at 0."""


def matrix_layers(module: nn.Module, tensors: Mapping[str, Tensor], x: Tensor) -> dict[str, Layer]:
    """Linear and 2-D convolution layers (zero padding) by name whose noise may be added to their outputs.

    Those that a forward pass of the points x calls exactly once, that give what their class computes, and whose weight
    and bias nothing else reads: a weight that is tied, or read by hand, would be noisy in one place and not in another.
    """
    reads = weight_reads(module, tensors, x)
    return {
        name: m
        for name, m in module.named_modules()
        if (isinstance(m, nn.Linear) or (isinstance(m, nn.Conv2d) and m.padding_mode == "zeros"))
        and reads[name].calls == 1
        and reads[name].alone
    }


@contextmanager
def noisy_outputs(
    layers: Mapping[str, Layer],
    estimator: Estimator,
    scales: Mapping[str, Tensor],
    stream: torch.Generator,
) -> Iterator[None]:
    """Within the block, each of `layers` adds the noise of its weights to its outputs.

    Args:
        layers: by name.
        estimator: local or flipout.
        scales: σ² (local) or perturbations σ ε (flipout) by parameter name; a tensor that is missing has no noise.
        stream: of the random numbers.
    """
    handles = []
    for name, layer in layers.items():
        weight, bias = scales.get(f"{name}.weight"), scales.get(f"{name}.bias")
        if weight is None:
            continue
        hook = _local(layer, weight, bias, stream) if estimator == "local" else _flipout(layer, weight, bias, stream)
        handles.append(layer.register_forward_hook(_once(hook, name), with_kwargs=True))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _once(hook: Callable[[Tensor, Tensor], Tensor], name: str) -> Callable[..., Tensor]:
    """The hook of one pass, given the layer's input by position or by name; a second call is refused."""
    called = False

    def once(module: nn.Module, args: tuple[Tensor, ...], kwargs: Mapping[str, Tensor], output: Tensor) -> Tensor:
        nonlocal called
        if called:
            raise RunFailed(
                f"Layer {name} must be called once per forward pass under method.estimator=local and flipout; this "
                "network calls it again for some inputs, where it would have other noise. Use method=bbb_weights."
            )
        called = True
        (x,) = args or kwargs.values()
        return hook(x, output)

    return once


def _local(layer: Layer, weight: Tensor, bias: Tensor | None, stream: torch.Generator) -> Callable[..., Tensor]:
    def hook(x: Tensor, output: Tensor) -> Tensor:
        variance = _apply(layer, x.square(), weight, bias)
        noise = torch.randn(output.shape, generator=stream, dtype=output.dtype, device=output.device)
        return torch.addcmul(output, (variance + _TINY).sqrt(), noise)

    return hook


def _flipout(layer: Layer, weight: Tensor, bias: Tensor | None, stream: torch.Generator) -> Callable[..., Tensor]:
    def hook(x: Tensor, output: Tensor) -> Tensor:
        before, after = _signs(layer, x, x, stream), _signs(layer, output, x, stream)
        return torch.addcmul(output, _apply(layer, x * before, weight, bias), after)

    return hook


def _apply(layer: Layer, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    if isinstance(layer, nn.Linear):
        return F.linear(x, weight, bias)
    return F.conv2d(x, weight, bias, layer.stride, layer.padding, layer.dilation, layer.groups)


def _signs(layer: Layer, shaped: Tensor, like: Tensor, stream: torch.Generator) -> Tensor:
    """Random signs of each point and channel of `shaped`, the same at all its positions."""
    if isinstance(layer, nn.Linear):
        shape = (shaped.shape[0], *(1,) * (shaped.dim() - 2), shaped.shape[-1])
    else:
        shape = (shaped.shape[0], shaped.shape[1], *(1,) * (shaped.dim() - 2))
    bits = torch.randint(0, 2, shape, generator=stream, device=like.device)
    return bits.to(like.dtype).mul_(2).sub_(1)
