"""The posterior of a network with noise layers: one draw is the network at one frozen row of noise."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor
from torch.func import functional_call

from bnn_runner.base import FitReport, Likelihood, Network, NoiseTransform
from bnn_runner.errors import RunFailed
from bnn_runner.rng import generator
from bnn_runner.runtime.torch_state import evaluation_mode
from bnn_runner.tasks import Split
from bnn_runner.training.noise_layers import noise_widths, split_noise

_FOLDED_ROWS, _FOLDED_NUMBERS = 16_384, 2**20
_CHECKED_POINTS, _CHECKED_DRAWS, _CHECKED_AT_ONCE = 16, 1024, 16


@dataclass(frozen=True)
class NoiseDraws:
    """S functions: the network (norm layers in evaluation mode) with row s of `noise` [S, ΣF] for every point."""

    network: Network
    noise: Tensor

    @property
    def likelihood(self) -> Likelihood:
        return self.network.likelihood

    @property
    def log_weights(self) -> Tensor:
        return torch.zeros(len(self.noise))

    @property
    def floats_per_draw(self) -> int:
        return int(self.noise.shape[-1])

    def __len__(self) -> int:
        return len(self.noise)

    def __getitem__(self, part: slice) -> NoiseDraws:
        return replace(self, noise=self.noise[part])

    @torch.no_grad()
    def __call__(self, x: Tensor) -> Tensor:
        """[S, B, K]; several draws run as one batch (points repeated under other noise) as long as that stays small."""
        rows = min(_FOLDED_ROWS, _FOLDED_NUMBERS // max(1, x[:1].numel()))
        at_once = max(1, rows // max(1, len(x)))
        with evaluation_mode(self.network.module):
            return torch.cat([self._outputs(x, noise) for noise in self.noise.split(at_once)])

    def _outputs(self, x: Tensor, noise: Tensor) -> Tensor:
        count, points = len(noise), len(x)
        if count == 1:
            return self._call(x, noise).unsqueeze(0)
        every = x.expand(count, *x.shape).reshape(count * points, *x.shape[1:])
        return self._call(every, noise.repeat_interleave(points, dim=0)).reshape(count, points, -1)

    def _call(self, x: Tensor, noise: Tensor) -> Tensor:
        module = self.network.module
        tensors = self.network.tensors | split_noise(noise, noise_widths(module))
        return functional_call(module, tensors, (x,))


@dataclass(frozen=True)
class NoisePosterior:
    """q(w): the trained weights times the noise of `noise_transform`; its centre is the network without noise."""

    network: Network
    noise_transform: NoiseTransform
    report: FitReport = field(default_factory=FitReport)
    treatment: Mapping[str, str] = field(default_factory=dict)
    finite: bool = False

    @property
    def likelihood(self) -> Likelihood:
        return self.network.likelihood

    def draws(self, num_draws: int, seed: int) -> NoiseDraws:
        widths = list(noise_widths(self.network.module).values())
        rows = [self.noise_transform.sample(1, widths, generator(seed, "dropout", s)) for s in range(num_draws)]
        like = next(iter(self.network.parameters.values()))
        return NoiseDraws(self.network, torch.cat(rows).to(like.device, like.dtype))

    def centre(self, x: Tensor) -> Tensor:
        """Outputs [B, K] with all noise at its mean (weight scaling)."""
        with torch.no_grad():
            return self.network(x)


def check_diversity(posterior: NoisePosterior, split: Split, advice: str) -> None:
    """Raise `RunFailed` when all draws coincide on the first points of `split`: then there is no posterior.

    A low rate changes few draws. Enough draws are compared not to miss one in a hundred that differs.
    """
    x, _ = split.gather(torch.arange(min(_CHECKED_POINTS, len(split))))
    draws = posterior.draws(_CHECKED_DRAWS, 0)
    first = draws[:1](x)
    for begin in range(0, _CHECKED_DRAWS, _CHECKED_AT_ONCE):
        if bool((draws[begin : begin + _CHECKED_AT_ONCE](x) - first).abs().max() > 0):
            return
    raise RunFailed(
        f"all draws of this posterior are the same function: in {_CHECKED_DRAWS:,} draws the noise never changed an "
        f"output at {len(x)} training points. {advice}"
    )
