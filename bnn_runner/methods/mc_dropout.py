"""MC dropout (Gal & Ghahramani 2016): a network trained under dropout; one posterior draw is one mask."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar, Literal

import torch
from torch import Tensor, nn

from bnn_runner.base import FitContext, FitReport, HyperRule, Network, Predictive, TrainingSpec
from bnn_runner.errors import UserError, raise_all
from bnn_runner.models.likelihoods import Gaussian
from bnn_runner.posteriors.noisy_network import NoisePosterior, check_diversity
from bnn_runner.tasks import Task, TaskSpec
from bnn_runner.training.noise_layers import Where, insert_noise, noisy_layers


def multiply(layer: nn.Module, x: Tensor, noise: Tensor) -> Tensor:
    """A dropout layer's output: x ξ."""
    return x * noise


@dataclass(frozen=True)
class DropoutNoise:
    """Multiplicative noise ξ of mean 1 and variance p/(1−p) on what a weight layer receives.

    bernoulli: ξ = z/(1−p), z ~ Bernoulli(1−p), the mask divided by the keep probability; gaussian:
    ξ ~ N(1, p/(1−p)) (Srivastava et al. 2014, §10). In both cases E ξ² = 1/(1−p), so that under a prior
    of precision λ the expected penalty of the weights w = M ξ is λ|M|²/(1−p) for the trained M.
    """

    rate: float | tuple[float, ...]
    kind: Literal["bernoulli", "gaussian"]
    where: Where

    def rates(self, count: int) -> list[float]:
        return list(self.rate) if isinstance(self.rate, tuple) else [self.rate] * count

    def apply(self, module: nn.Module) -> None:
        names = noisy_layers(module, self.where)
        if len(self.rates(len(names))) != len(names):
            raise UserError(
                f"method.rate must be one number, or one for each of the {len(names)} layers with noise "
                f"({', '.join(names)}); got {list(self.rates(0))}."
            )
        insert_noise(module, names, multiply)

    def precisions(self, module: nn.Module, prior: Mapping[str, float]) -> dict[str, float]:
        names = noisy_layers(module, self.where)
        keep = {f"{name}.weight": 1 - p for name, p in zip(names, self.rates(len(names)), strict=True)}
        return {name: precision / keep.get(name, 1.0) for name, precision in prior.items()}

    def sample(self, rows: int, widths: Sequence[int], random: torch.Generator) -> Tensor:
        p = torch.repeat_interleave(torch.tensor(self.rates(len(widths))), torch.tensor(widths))
        if self.kind == "gaussian":
            return 1 + (p / (1 - p)).sqrt() * torch.randn(rows, len(p), generator=random)
        return (torch.rand(rows, len(p), generator=random) >= p) / (1 - p)

    def penalty(self, parameters: Mapping[str, Tensor], prior: Mapping[str, float], widths: Mapping[str, int]) -> None:
        return None

    def decays(self, parameters: Mapping[str, Tensor], prior: Mapping[str, float]) -> dict[str, Tensor]:
        return {}


@dataclass(frozen=True)
class MCDropout:
    """Dropout that stays on at prediction.

    Attributes:
        rate: share of inputs dropped before each weight layer, one number or one per layer.
        kind: bernoulli or gaussian noise.
        where: which layers have noise (see `noisy_layers`).
        noise: of regression: as trained (trained), or times the factor of `noise_multiples` with the best marginal
            log-likelihood of the validation part (validation; the choice of tau in Gal & Ghahramani 2016, §4.3, on
            a grid).
        noise_multiples: factors of the noise standard deviation.
        validation_draws: draws for that log-likelihood.
    """

    rate: float | tuple[float, ...] = 0.05
    kind: Literal["bernoulli", "gaussian"] = "bernoulli"
    where: Where = "auto"
    noise: Literal["trained", "validation"] = "trained"
    noise_multiples: tuple[float, ...] = (0.5, 0.6, 0.7, 0.85, 1.0, 1.2, 1.4, 1.7, 2.0, 2.4, 2.8)
    validation_draws: int = 200
    finite: ClassVar[bool] = False
    uses_hyper: ClassVar[bool] = False
    predictive: ClassVar[Predictive] = "draws"
    cites: ClassVar[tuple[str, ...]] = ("gal2016", "srivastava2014")

    def __post_init__(self) -> None:
        problems = []
        rates = self.rate if isinstance(self.rate, tuple) else (self.rate,)
        if any(not 0 <= p < 1 for p in rates) or not any(p > 0 for p in rates):
            problems.append(
                f"method.rate must be in [0, 1), with at least one rate above 0; got {self.rate}. "
                "Without noise all draws are one function, which is method=map."
            )
        if not self.noise_multiples or any(not m > 0 for m in self.noise_multiples):
            problems.append(
                "method.noise_multiples must be a list of positive factors of the trained noise standard deviation; "
                f"got {list(self.noise_multiples)}."
            )
        if self.validation_draws < 1:
            problems.append(f"method.validation_draws must be at least 1; got {self.validation_draws}.")
        raise_all(problems)

    @property
    def noise_transform(self) -> DropoutNoise:
        return DropoutNoise(self.rate, self.kind, self.where)

    def problems(self, spec: TaskSpec, hyper: HyperRule | None) -> list[str]:
        if self.noise == "trained":
            return []
        if spec.kind == "classification":
            return [f"method.noise=validation requires a regression; data={spec.name} has classes. Use trained."]
        if spec.val_fraction == 0:
            return [
                "method.noise=validation requires validation data; data.val_fraction=0 leaves none. "
                "Set data.val_fraction=0.1, or use method.noise=trained."
            ]
        return []

    def needs(self) -> list[TrainingSpec]:
        return [TrainingSpec(0, noise_transform=self.noise_transform)]

    def fit(self, task: Task, networks: Sequence[Network], context: FitContext) -> NoisePosterior:
        network = networks[0]
        names = noisy_layers(network.module, self.where)
        rates = dict(zip(names, self.noise_transform.rates(len(names)), strict=True))
        treatment = dict.fromkeys(network.parameters, "point estimate")
        for name, p in rates.items():
            factor = "mask of its inputs" if self.kind == "bernoulli" else "Gaussian noise on its inputs"
            if f"{name}.weight" in treatment:
                treatment[f"{name}.weight"] = f"times the {factor}, rate {p:g}; prior precision divided by {1 - p:g}"
                continue
            parts = [n for n in treatment if n.startswith(f"{name}.") and n != f"{name}.bias"]
            rule = f"its layer's weight times the {factor}, rate {p:g}; prior as given, of this tensor"
            treatment |= dict.fromkeys(parts, rule)
        own = [n for n, m in network.module.named_modules() if isinstance(m, nn.modules.dropout._DropoutNd) and m.p > 0]
        notes = []
        if own:
            notes.append(
                f"the network's own dropout layers ({', '.join(own)}) act in training only; draws have the noise of "
                "method.rate"
            )
        report = FitReport({"noisy_layers": len(names)}, tuple(notes))
        posterior = NoisePosterior(network, self.noise_transform, report, treatment)
        check_diversity(posterior, task.train, "Raise method.rate, or use another model or method.where=all.")
        return self._with_chosen_noise(posterior, task, context) if self.noise == "validation" else posterior

    def _with_chosen_noise(self, posterior: NoisePosterior, task: Task, context: FitContext) -> NoisePosterior:
        likelihood = posterior.likelihood
        if not isinstance(likelihood, Gaussian):
            raise UserError(
                "method.noise=validation requires likelihood.form=homoscedastic; under this form the network predicts "
                "the noise at each input. Use method.noise=trained."
            )
        if not len(task.val):  # a cost estimate runs without a validation part
            return posterior
        outputs, targets = validation_outputs(posterior, task, self.validation_draws, context)
        scores = {}
        for multiple in self.noise_multiples:
            scaled = Gaussian(likelihood.log_noise + torch.tensor(multiple).log())
            scores[multiple] = float(scaled.log_prob(outputs, targets).logsumexp(0).mean())
        best = max(scores, key=lambda m: scores[m])
        chosen = replace(posterior.network, likelihood=Gaussian(likelihood.log_noise + torch.tensor(best).log()))
        notes = []
        if best in (min(scores), max(scores)):
            notes.append(
                f"the best noise, {best:g} times the trained one, is at the edge of method.noise_multiples; widen it"
            )
        return replace(posterior, network=chosen, report=posterior.report.extended({"noise_multiple": best}, notes))


def validation_outputs(
    posterior: NoisePosterior, task: Task, num_draws: int, context: FitContext
) -> tuple[Tensor, Tensor]:
    """Outputs [S, N, K] of `num_draws` draws at the validation part, and its targets."""
    draws, pieces, targets, done = posterior.draws(num_draws, context.seed), [], [], 0
    for x, y in task.val.batches(256):
        context.progress("noise on validation", done, len(task.val))
        assert y is not None
        pieces.append(draws(x))
        targets.append(y)
        done += len(x)
    return torch.cat(pieces, dim=1), torch.cat(targets)
