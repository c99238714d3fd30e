"""Gaussian priors over the weights: N(0, Λ⁻¹) with one precision for each parameter tensor."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, Protocol

from torch import nn

from bnn_runner.errors import UserError


class Prior(Protocol):
    """The prior used in training; MAP minimises mean(−log p) + (1/2N) wᵀΛw under it."""

    def precisions(self, module: nn.Module) -> dict[str, float]:
        """The precision of each parameter tensor, by name."""
        ...


def _check_precision(precision: float) -> None:
    if not 0 <= precision < float("inf"):
        raise UserError(f"prior.precision must be at least 0 and finite; got {precision}.")


@dataclass(frozen=True)
class Isotropic:
    """Λ = λ I over every trainable parameter."""

    precision: float = 1.0

    def __post_init__(self) -> None:
        _check_precision(self.precision)

    def precisions(self, module: nn.Module) -> dict[str, float]:
        return {name: float(self.precision) for name, _ in module.named_parameters()}


@dataclass(frozen=True)
class Layerwise:
    """One precision for each parameter tensor (weight and bias apart).

    scaling=fan_in: a weight tensor has precision λ × fan-in, so that pre-activations keep their
    prior variance at any width (Neal 1996, §2.1); vectors (biases, norm scales) have λ.
    scaling=none: λ everywhere, as a start for layerwise hyperparameter rules.
    """

    precision: float = 1.0
    scaling: Literal["fan_in", "none"] = "fan_in"

    def __post_init__(self) -> None:
        _check_precision(self.precision)

    def precisions(self, module: nn.Module) -> dict[str, float]:
        def scale(shape: tuple[int, ...]) -> float:
            fan_in = 1
            for n in shape[1:]:
                fan_in *= n
            return float(fan_in) if self.scaling == "fan_in" and len(shape) > 1 else 1.0

        return {name: float(self.precision) * scale(tuple(p.shape)) for name, p in module.named_parameters()}
