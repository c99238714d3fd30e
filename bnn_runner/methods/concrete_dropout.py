"""Concrete dropout (Gal, Hron & Kendall 2017): dropout with a learned rate for each weight layer."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor, nn

from bnn_runner.base import FitContext, FitReport, HyperRule, Network, Predictive, TrainingSpec
from bnn_runner.errors import UserError, raise_all
from bnn_runner.posteriors.noisy_network import NoisePosterior, check_diversity
from bnn_runner.tasks import Task, TaskSpec
from bnn_runner.training.noise_layers import NOISE, Where, insert_noise, noise_widths, noisy_layers

LOGIT = "rate_logit"


@dataclass(frozen=True)
class ConcreteNoise:
    """Relaxed Bernoulli masks with a learned rate p = sigmoid(logit) for each layer (equation 5 there).

    A layer receives x (1 − z)/(1 − p), z = sigmoid((logit p + logit u)/t), with u uniform and t the
    temperature. The penalty is the KL divergence to the prior up to a constant, in nats, once for
    the whole data set: Σ over layers of ½ λ|M|²/(1−p) − F H(p), for the trained weights M of a layer
    with F input features, with H(p) the entropy of one mask (equations 3 and 4 there, whose M is
    ours divided by 1−p).
    """

    initial_rate: float
    temperature: float
    where: Where

    def apply(self, module: nn.Module) -> None:
        names = noisy_layers(module, self.where)
        parameters = dict(module.named_parameters())
        if without := [name for name in names if f"{name}.weight" not in parameters]:
            raise UserError(
                "method=concrete_dropout requires that the weight of every layer is a parameter of its own, whose KL "
                f"divergence has the layer's rate; got {', '.join(without)}, whose weight is shared with another layer "
                "or computed (weight_norm, spectral_norm). Use method=mc_dropout, or method=bbb_weights for a shared "
                "weight."
            )
        insert_noise(module, names, self._relaxed)
        for name in names:
            start = torch.tensor(math.log(self.initial_rate / (1 - self.initial_rate)))
            module.get_submodule(name).register_parameter(LOGIT, nn.Parameter(start))

    def _relaxed(self, layer: nn.Module, x: Tensor, u: Tensor) -> Tensor:
        logit = getattr(layer, LOGIT)
        if logit.dim():  # one rate per network of a stack
            logit = logit.reshape(-1, *[1] * (u.dim() - 1))
        keep = torch.sigmoid(-(logit + torch.logit(u)) / self.temperature)
        return x * (keep * (1 + logit.exp()))  # 1/(1−p) = 1 + e^logit

    def precisions(self, module: nn.Module, prior: Mapping[str, float]) -> dict[str, float]:
        names = noisy_layers(module, self.where)
        elsewhere = {f"{name}.{kind}" for name in names for kind in ("weight", LOGIT)}
        return {name: 0.0 if name in elsewhere else precision for name, precision in prior.items()}

    def sample(self, rows: int, widths: Sequence[int], random: torch.Generator) -> Tensor:
        # Away from 0, where the logit would be infinite; 1 is not among these numbers.
        return torch.rand(rows, sum(widths), generator=random).clamp_min(2.0**-25)

    def penalty(
        self, parameters: Mapping[str, Tensor], prior: Mapping[str, float], widths: Mapping[str, int]
    ) -> Tensor:
        total = torch.zeros(())
        for name, logit in parameters.items():  # [L]
            layer, _, kind = name.rpartition(".")
            if kind != LOGIT:
                continue
            weight, p = parameters[f"{layer}.weight"], torch.sigmoid(logit)
            rows = weight.detach().flatten(1)
            squares = torch.stack([torch.dot(row, row) for row in rows])  # without a tensor of the weights' size
            energy = 0.5 * prior[f"{layer}.weight"] * squares * (1 + logit.exp())
            # −H(p) = p log p + (1−p) log(1−p), with both logarithms from the logit
            negentropy = p * nn.functional.logsigmoid(logit) + (1 - p) * nn.functional.logsigmoid(-logit)
            total = total.to(energy) + energy + widths[f"{layer}.{NOISE}"] * negentropy
        return total

    def decays(self, parameters: Mapping[str, Tensor], prior: Mapping[str, float]) -> dict[str, Tensor]:
        found = {}
        for name, logit in parameters.items():
            layer, _, kind = name.rpartition(".")
            if kind == LOGIT:
                found[f"{layer}.weight"] = prior[f"{layer}.weight"] * (1 + logit.exp())
        return found


def _listed(rates: Mapping[str, float]) -> str:
    """Rates, however small, in words: `hidden.0 0.0001, out 4e-06`."""
    return ", ".join(f"{name} {p:.3g}" for name, p in rates.items())


@dataclass(frozen=True)
class ConcreteDropout:
    """Dropout with learned rates; draws use the relaxed masks of training, one mask for all points.

    Attributes:
        initial_rate: first rate of every layer.
        temperature: of the relaxation; masks are hard at 0.
        where: which layers have noise (see `noisy_layers`).
    """

    initial_rate: float = 0.1
    temperature: float = 0.1
    where: Where = "auto"
    finite: ClassVar[bool] = False
    uses_hyper: ClassVar[bool] = False
    predictive: ClassVar[Predictive] = "draws"
    cites: ClassVar[tuple[str, ...]] = ("gal2017",)

    def __post_init__(self) -> None:
        problems = []
        if not 0 < self.initial_rate < 1:
            problems.append(f"method.initial_rate must be between 0 and 1; got {self.initial_rate}.")
        if not 0 < self.temperature < math.inf:
            problems.append(f"method.temperature must be positive and finite; got {self.temperature}.")
        raise_all(problems)

    @property
    def noise_transform(self) -> ConcreteNoise:
        return ConcreteNoise(self.initial_rate, self.temperature, self.where)

    def problems(self, spec: TaskSpec, hyper: HyperRule | None) -> list[str]:
        return []

    def needs(self) -> list[TrainingSpec]:
        return [TrainingSpec(0, noise_transform=self.noise_transform)]

    def fit(self, task: Task, networks: Sequence[Network], context: FitContext) -> NoisePosterior:
        network = networks[0]
        names = [name.rpartition(".")[0] for name in noise_widths(network.module)]
        rates = {name: float(torch.sigmoid(network.parameters[f"{name}.{LOGIT}"])) for name in names}
        treatment = dict.fromkeys(network.parameters, "point estimate")
        for name in names:
            treatment[f"{name}.weight"] = "times a relaxed mask of its inputs at a learned rate"
            treatment[f"{name}.{LOGIT}"] = "learned rate (point estimate)"
        report = FitReport({"rates": rates}, (f"learned dropout rates: {_listed(rates)}",))
        posterior = NoisePosterior(network, self.noise_transform, report, treatment)
        advice = (
            f"The learned rates are {_listed(rates)}: training has removed the noise. Train for fewer epochs "
            "(schedule.epochs), or use method=mc_dropout, whose rate is fixed."
        )
        check_diversity(posterior, task.train, advice)
        return posterior
