"""Stochastic layers whose noise is an input of the network, not hidden randomness.

The `TrainingSpec` of a method may require a network in which some weight layers change their input by noise. The noise
is a buffer of the layer, `<layer>.noise` [B, F]. An empty buffer ([0, F], the initial state) means no noise: the
network at the mean of its noise. Training fills the buffers from a stream of (lane seed, step), so a lane does not
depend on other lanes, and a resumed training gives the same bits. A posterior draw fills them with one row [1, F] for
all points, so it is a frozen function.

Letters: L lanes, B points of a batch, F features (channels) of a layer's input.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Literal

import torch
from torch import Tensor, nn

from bnn_runner.base import NoiseTransform
from bnn_runner.errors import RunFailed, UserError, raise_all
from bnn_runner.models.weight_reads import weight_reads
from bnn_runner.rng import generator

NOISE = "noise"
_BLOCK = 2**18  # random numbers drawn at once for one lane

Where = Literal["auto", "all", "hidden"]
NoiseLayer = Callable[[nn.Module, Tensor, Tensor], Tensor]
"""(layer, its input, its noise in a shape that broadcasts against the input) -> the new input of the layer."""


def weight_layers(module: nn.Module) -> dict[str, nn.Module]:
    """Returns the linear layers and convolutions by name, in the order of their registration.

    Without the output layer of `nn.MultiheadAttention`, whose weight PyTorch reads without calling the layer.
    """
    kinds = (nn.Linear, nn.modules.conv._ConvNd)
    uncalled = {id(m.out_proj) for m in module.modules() if isinstance(m, nn.MultiheadAttention)}
    return {name: m for name, m in module.named_modules() if isinstance(m, kinds) and id(m) not in uncalled}


def noisy_layers(module: nn.Module, where: Where) -> list[str]:
    """Returns the names of the weight layers whose inputs get noise.

    Args:
        module: The network.
        where: 'all': every layer, also the first (Gal & Ghahramani 2016 for regression). 'hidden': all but the first.
            'auto': 'hidden' if the first layer is a convolution, because dropping the channel of a grey image would
            drop the image (their LeNet drops no input either); else 'all'.
    """
    layers = weight_layers(module)
    names = list(layers)
    skip_first = where == "hidden" or (where == "auto" and names and not isinstance(layers[names[0]], nn.Linear))
    return names[1:] if skip_first else names


def insert_noise(module: nn.Module, names: Sequence[str], layer: NoiseLayer) -> None:
    """Registers noise buffers and hooks, so that the named weight layers receive `layer(module, x, noise)`.

    The noise has one number per input feature of a linear layer, and one per input channel of a convolution.

    Args:
        module: The network; changed in place.
        names: Names of its weight layers.
        layer: Computes the new input of a layer.

    Raises:
        UserError: If `names` is empty.
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
        target.register_forward_pre_hook(_hook(layer, name), with_kwargs=True)


def check_noise_layers(module: nn.Module, tensors: Mapping[str, Tensor], x: Tensor) -> None:
    """Checks that noise on the inputs of the noise layers acts as noise on their weights, by passes of the points x.

    A mask of a layer's inputs is a mask of its weight's columns as long as nothing but the layer reads the weight.

    Raises:
        UserError: If a weight is read elsewhere too, or a layer does not receive one row per point.
    """
    problems = []
    for name, reads in weight_reads(module, tensors, x).items():
        if not hasattr(module.get_submodule(name), NOISE):
            continue
        if any(n.rpartition(".")[2] == "weight" for n in reads.outside):
            problems.append(
                f"The weight of layer {name} must be read by this layer alone, since the noise is on the layer's "
                "inputs; this network reads it elsewhere too. Use method=bbb_weights."
            )
        elif not reads.whole:
            problems.append(
                f"Layer {name} must receive one row per point, since each point has its own noise; this network gives "
                "it another number of rows. Use method=bbb_weights."
            )
    raise_all(problems)


def _hook(layer: NoiseLayer, name: str) -> Callable[..., tuple[tuple[Tensor, ...], dict[str, Tensor]] | None]:
    def hook(
        module: nn.Module, args: tuple[Tensor, ...], kwargs: dict[str, Tensor]
    ) -> tuple[tuple[Tensor, ...], dict[str, Tensor]] | None:
        noise = getattr(module, NOISE)
        if noise.shape[-2] == 0:
            return None
        key = "" if args else next(iter(kwargs))
        x = args[0] if args else kwargs[key]
        # All positions of a point (tokens before the last axis, pixels after the channels) share its noise.
        extra = (1,) * (x.dim() - noise.dim())
        shape = (*noise.shape, *extra)
        if isinstance(module, nn.Linear):
            shape = (*noise.shape[:-1], *extra, noise.shape[-1])
        try:
            noisy = layer(module, x, noise.reshape(shape))
            return ((noisy, *args[1:]), kwargs) if args else ((), {**kwargs, key: noisy})
        except RuntimeError as error:
            raise RunFailed(
                f"Layer {name} receives a tensor of shape {list(x.shape)}, which does not keep one row per point ("
                f"{noise.shape[-2]} points); noise layers require that. Choose another network or method. ({error}"
                ")"
            ) from error

    return hook


def noise_widths(module: nn.Module) -> dict[str, int]:
    """Returns the full name and the width F of every noise buffer, in order."""
    return {name: b.shape[-1] for name, b in module.named_buffers() if name.rpartition(".")[2] == NOISE}


def split_noise(noise: Tensor, widths: Mapping[str, int]) -> dict[str, Tensor]:
    """Splits noise [..., ΣF] into one buffer [..., F] per layer."""
    return dict(zip(widths, noise.split(list(widths.values()), dim=-1), strict=True))


class StepNoise:
    """The noise of training steps, from the stream (lane seed, "dropout").

    Args:
        noise_transform: Samples the noise.
        module: The network, with noise buffers.
        seeds: Seed of each lane, L of them.
        batch: Largest batch size.
        device: Where the noise is used.
    """

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
        """Returns the buffers [L, points, F] of step number `step` (from 0)."""
        block, position = divmod(step, self.steps)
        if self._block is None or self._block[0] != block:
            rows = self.steps * self.batch
            lanes = [
                self.noise_transform.sample(rows, list(self.widths.values()), generator(seed, "dropout", block))
                for seed in self.seeds
            ]
            noise = torch.stack(lanes).to(self.device, self.dtype)
            self._block = block, noise.reshape(len(lanes), self.steps, self.batch, -1)
        return split_noise(self._block[1][:, position, :points], self.widths)
