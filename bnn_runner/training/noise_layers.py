"""Networks reworked for training: stochastic layers whose noise is an input, not hidden randomness.

A method may ask, in its `TrainingSpec`, for a network in which some weight layers multiply what they
receive by noise. The noise lies in one buffer a layer, `<layer>.noise` [B, F]; an empty one
([0, F], as built) means no noise: the network at the mean of its noise. Training fills the buffers
from a stream of (lane seed, step), so lanes equal lanes alone and a resumed training goes on bit for
bit; a posterior draw fills them with one row [1, F] for all points, so it is a frozen function.

Letters: L lanes, B points of a batch, F features (channels) that a layer receives.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Literal

import torch
from torch import Tensor, nn

from bnn_runner.base import NoiseTransform
from bnn_runner.errors import RunFailed, UserError
from bnn_runner.rng import generator

NOISE = "noise"
_BLOCK = 2**18  # numbers of noise drawn at once for one lane

Where = Literal["auto", "all", "hidden"]
NoiseLayer = Callable[[nn.Module, Tensor, Tensor], Tensor]
"""(layer, its input, its noise laid out to broadcast against the input) -> what the layer receives instead."""


def weight_layers(module: nn.Module) -> dict[str, nn.Module]:
    """Linear layers and convolutions by name, in the order in which the network registers them."""
    kinds = (nn.Linear, nn.modules.conv._ConvNd)
    return {name: m for name, m in module.named_modules() if isinstance(m, kinds)}


def noisy_layers(module: nn.Module, where: Where) -> list[str]:
    """The weight layers whose inputs get noise.

    all: every one, the first included (Gal & Ghahramani 2016 for regression); hidden: all but the
    first; auto: hidden where the first is a convolution, since a dropped channel of an image would be
    the image (their LeNet drops no input either), else all.
    """
    layers = weight_layers(module)
    names = list(layers)
    skip_first = where == "hidden" or (where == "auto" and names and not isinstance(layers[names[0]], nn.Linear))
    return names[1:] if skip_first else names


def insert_noise(module: nn.Module, names: Sequence[str], layer: NoiseLayer) -> None:
    """Let the named weight layers receive `layer(module, x, noise)`. Convolutions have one number a channel.

    Raises `UserError` when there is no layer to name.
    """
    if not names:
        raise UserError(
            "The network has no layer for the noise, so all draws would be the same function. Choose another "
            "network, or method.where=all."
        )
    layers = weight_layers(module)
    for name in names:
        target = layers[name]
        width = target.in_features if isinstance(target, nn.Linear) else target.in_channels
        assert isinstance(width, int)
        target.register_buffer(NOISE, torch.empty(0, width))
        target.register_forward_pre_hook(_hook(layer, name))


def _hook(layer: NoiseLayer, name: str) -> Callable[[nn.Module, tuple[Tensor, ...]], tuple[Tensor, ...]]:
    def hook(module: nn.Module, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        (x,) = inputs
        noise = getattr(module, NOISE)
        if noise.shape[-2] == 0:
            return inputs
        # Positions (tokens before the last axis, pixels after the channels) share the noise of their point.
        extra = (1,) * (x.dim() - noise.dim())
        shape = (*noise.shape, *extra)
        if isinstance(module, nn.Linear):
            shape = (*noise.shape[:-1], *extra, noise.shape[-1])
        try:
            return (layer(module, x, noise.reshape(shape)),)
        except RuntimeError as error:
            raise RunFailed(
                f"Layer {name} receives a tensor of shape {list(x.shape)}, which does not keep one row per point ("
                f"{noise.shape[-2]} points); noise layers require that. Choose another network or method. ({error}"
                ")"
            ) from error

    return hook


def noise_widths(module: nn.Module) -> dict[str, int]:
    """Every noise buffer's full name and width F, in order."""
    return {name: b.shape[-1] for name, b in module.named_buffers() if name.rpartition(".")[2] == NOISE}


def split_noise(noise: Tensor, widths: Mapping[str, int]) -> dict[str, Tensor]:
    """Noise [..., ΣF] as a buffer for each layer."""
    return dict(zip(widths, noise.split(list(widths.values()), dim=-1), strict=True))


class StepNoise:
    """The noise of every training step: lane l at step t has its own part of the stream (seed of l, "dropout")."""

    def __init__(
        self, noise_transform: NoiseTransform, module: nn.Module, seeds: Sequence[int], batch: int, device: torch.device
    ) -> None:
        self.noise_transform, self.seeds, self.batch, self.device = noise_transform, seeds, batch, device
        parameter = next(module.parameters())
        self.dtype = parameter.dtype
        self.widths = noise_widths(module)
        self.steps = max(1, _BLOCK // (batch * sum(self.widths.values())))
        self._block: tuple[int, Tensor] | None = None

    def at(self, step: int, points: int) -> dict[str, Tensor]:
        """Buffers [L, points, F] for step `step`, counted from 0."""
        block, place = divmod(step, self.steps)
        if self._block is None or self._block[0] != block:
            rows = self.steps * self.batch
            lanes = [
                self.noise_transform.sample(rows, list(self.widths.values()), generator(seed, "dropout", block))
                for seed in self.seeds
            ]
            noise = torch.stack(lanes).to(self.device, self.dtype)
            self._block = block, noise.reshape(len(lanes), self.steps, self.batch, -1)
        return split_noise(self._block[1][:, place, :points], self.widths)
