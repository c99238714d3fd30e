"""Bayes by Backprop (Blundell et al. 2015): a factorised Gaussian over every weight, fitted by the ELBO."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar, Literal

import torch
from torch import nn

from bnn_runner.base import FitContext, FitReport, HyperRule, Network, Predictive, TrainingSpec
from bnn_runner.errors import RunFailed, UserError, raise_all
from bnn_runner.rng import derive_seed
from bnn_runner.tasks import Task, TaskSpec
from bnn_runner.training.schedules import Schedule
from bnn_runner.variational.fit import Annealing, Fit, Plan, run
from bnn_runner.variational.kl import GaussianPrior, KLTerm, ScaleMixture
from bnn_runner.variational.posterior import MeanField

_NORMS = (nn.modules.batchnorm._BatchNorm, nn.LayerNorm, nn.GroupNorm)
_HOW = {
    "local": "local reparametrisation",
    "flipout": "Flipout",
}


@dataclass(frozen=True)
class BBB:
    """q(w) = Π N(μ, σ²), σ = softplus(ρ), maximising E_q log p(D | w) − KL(q ‖ prior).

    Attributes:
        estimator: of the gradient: local, flipout or weights (see `variational.estimators`).
        samples: of it per step.
        prior: training (the run's Gaussian prior), or scale_mixture: mixture_weight N(0, sigma1²) + (1 −
            mixture_weight) N(0, sigma2²).
        mixture_weight: of the wide component.
        sigma1: of the wide component.
        sigma2: of the narrow component.
        norm: scale and shift of normalisation layers are gaussian, like other weights, or point estimates.
        start: map (the MAP network's weights) or init (initial weights).
        rho_init: first value of ρ.
        epochs: of this fit; None is the schedule's.
        lr: of this fit; None is the schedule's.
        kl_annealing: constant, linear (over the first `kl_warmup` of the steps) or blundell.
        kl_warmup: share of the steps.
        likelihood_temperature: T; the KL counts T times (below 1: a cold posterior).
        noise: of regression: learned jointly, from the start network's value (unless likelihood.noise=fixed), or kept
            at that value.
        elbo_draws: draws that the reported ELBO is averaged over.
    """

    estimator: Literal["local", "flipout", "weights"] = "local"
    samples: int = 1
    prior: Literal["training", "scale_mixture"] = "training"
    mixture_weight: float = 0.75
    sigma1: float = 1.0
    sigma2: float = 0.0025
    norm: Literal["gaussian", "point"] = "gaussian"
    start: Literal["map", "init"] = "map"
    rho_init: float = -4.0
    epochs: int | None = None
    lr: float | None = None
    kl_annealing: Annealing = "constant"
    kl_warmup: float = 0.25
    likelihood_temperature: float = 1.0
    noise: Literal["learned", "kept"] = "learned"
    elbo_draws: int = 10
    finite: ClassVar[bool] = False
    uses_hyper: ClassVar[bool] = False
    predictive: ClassVar[Predictive] = "draws"
    cites: ClassVar[tuple[str, ...]] = ("blundell2015", "kingma2015", "wen2018")

    def __post_init__(self) -> None:
        problems = [
            f"method.{name} must be at least 1; got {value}."
            for name, value in (("samples", self.samples), ("elbo_draws", self.elbo_draws), ("epochs", self.epochs))
            if value is not None and value < 1
        ]
        if not 0 < self.mixture_weight < 1:
            problems.append(f"method.mixture_weight must be between 0 and 1; got {self.mixture_weight}.")
        if not 0 < self.sigma2 <= self.sigma1 < math.inf:
            problems.append(
                "method.sigma1 and method.sigma2 must satisfy 0 < sigma2 <= sigma1; got "
                f"sigma1={self.sigma1} and sigma2={self.sigma2}."
            )
        if self.lr is not None and not 0 < self.lr < math.inf:
            problems.append(f"method.lr must be positive and finite, or null; got {self.lr}.")
        if not 0 <= self.kl_warmup <= 1:
            problems.append(f"method.kl_warmup must be in [0, 1] (a share of the steps); got {self.kl_warmup}.")
        if not 0 < self.likelihood_temperature < math.inf:
            problems.append(
                f"method.likelihood_temperature must be positive and finite; got {self.likelihood_temperature}."
            )
        if not -20 <= self.rho_init <= 20:
            problems.append(
                f"method.rho_init must be between -20 and 20; got {self.rho_init}. The first standard deviation is "
                "about exp(rho_init), so that -4 is a common value."
            )
        raise_all(problems)

    def problems(self, spec: TaskSpec, hyper: HyperRule | None) -> list[str]:
        return []

    def needs(self) -> list[TrainingSpec]:
        return [TrainingSpec(0, trained=self.start == "map")]

    def own_epochs(self, schedule: Schedule) -> int:
        """Of the variational training."""
        return self.epochs or schedule.epochs

    def decided(self, task: Task, network: Network) -> BBB:
        """With a tiny learning rate: on the few points of a timing the KL dominates, and the fit could diverge."""
        return replace(self, lr=1e-12)

    def fit(self, task: Task, networks: Sequence[Network], context: FitContext) -> MeanField:
        network = networks[0]
        seed = derive_seed(context.seed, "bbb")
        fit = self.begin(task, network, context.schedule, seed, learn_noise=not context.noise_fixed)
        has_batchnorm = any(isinstance(m, nn.modules.batchnorm._BatchNorm) for m in network.module.modules())
        if has_batchnorm and min(b - a for a, b in fit.bounds) < 2:
            raise UserError(
                "Batch normalisation requires at least 2 points per training batch; one batch has 1. Change "
                "schedule.batch_size, or use a model without batch normalisation."
            )
        run(fit, context)
        for line in fit.history:
            context.record(line)
        sigmas = fit.sigmas()
        fitted = replace(network, parameters=fit.mu, buffers=fit.buffers, likelihood=fit.likelihood())
        treatment = {}
        for name in fit.mu:
            how = _HOW[self.estimator] if name in fit.hooked else "weight samples"
            treatment[name] = f"factorised Gaussian ({how})" if name in sigmas else "point estimate (method.norm=point)"
        posterior = MeanField(fitted, sigmas, treatment=treatment)
        report = self._report(task, posterior, fit)
        if has_batchnorm:
            note = "batchnorm statistics are the running averages of variational training, the same for all draws"
            report = report.extended({}, [note])
        return replace(posterior, report=report)

    def begin(self, task: Task, network: Network, schedule: Schedule, seed: int, learn_noise: bool = True) -> Fit:
        """The fit before its first step.

        Args:
            task: the training set.
            network: where the means start, with the prior and the likelihood.
            schedule: of training; the method's own epochs and lr replace its.
            seed: of all randomness.
            learn_noise: whether the regression noise may be optimised.
        """
        owners = {n: network.module.get_submodule(n.rpartition(".")[0]) for n in network.parameters}
        norms = {n for n, owner in owners.items() if isinstance(owner, _NORMS)}
        epochs = self.own_epochs(schedule)
        schedule = replace(
            schedule, epochs=epochs, lr=self.lr or schedule.lr, warmup_epochs=min(schedule.warmup_epochs, epochs)
        )
        plan = Plan(
            schedule=schedule,
            estimator=self.estimator,
            samples=self.samples,
            annealing=self.kl_annealing,
            warmup=self.kl_warmup,
            temperature=self.likelihood_temperature,
            rho=self.rho_init,
            learn_noise=learn_noise and self.noise == "learned",
            complexities={n: self._complexity(network, n) for n in network.parameters},
            point=frozenset(norms if self.norm == "point" else ()),
        )
        return Fit(task, network, plan, seed)

    def _complexity(self, network: Network, name: str) -> KLTerm:
        if self.prior == "scale_mixture":
            return ScaleMixture(self.mixture_weight, self.sigma1, self.sigma2)
        precision = network.prior_precision[name]
        if precision <= 0:
            raise RunFailed(
                f"method=bbb requires a positive prior precision; that of {name} is 0, so the KL is infinite. Set "
                "prior.precision to a positive value, or use method.prior=scale_mixture."
            )
        return GaussianPrior(precision)

    @torch.no_grad()
    def _report(self, task: Task, posterior: MeanField, fit: Fit) -> FitReport:
        """The ELBO of the data set in nats (original target units): the mean over draws and its standard error."""
        seed = derive_seed(fit.seed, "elbo")
        logliks = torch.zeros(self.elbo_draws, dtype=torch.float64)
        draws = posterior.draws(self.elbo_draws, seed)
        for s in range(self.elbo_draws):
            one = draws[s : s + 1]
            for x, y in task.train.batches(1024):
                assert y is not None
                logliks[s] += float(one.likelihood.log_prob(one(x), y).double().sum())
        logliks -= len(task.train) * float(task.target_scale.double().log().sum())
        stream = torch.Generator(fit.device).manual_seed(seed)
        kls = torch.tensor([fit.kl(stream) for _ in range(self.elbo_draws)], dtype=torch.float64)
        elbos = logliks - kls
        error = float(elbos.std() / math.sqrt(self.elbo_draws)) if self.elbo_draws > 1 else float("nan")
        every_sigma = torch.cat([s.flatten() for s in posterior.sigmas.values()])
        note = f"ELBO {float(elbos.mean()):.2f} ± {error:.2f} nats for the data set (KL {float(kls.mean()):.2f})"
        if self.likelihood_temperature != 1:
            note += f"; fitted with the KL times {self.likelihood_temperature:g}"
        facts = {
            "elbo_nats": float(elbos.mean()),
            "elbo_standard_error": error,
            "expected_loglik_nats": float(logliks.mean()),
            "kl_nats": float(kls.mean()),
            "likelihood_temperature": self.likelihood_temperature,
            "weights_with_spread": len(every_sigma),
            "median_sigma": float(every_sigma.median()),
            "last_epoch": fit.history[-1] if fit.history else {},
        }
        return FitReport(facts, (note,))
