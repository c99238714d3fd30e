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

    estimator: local, flipout or weights (see `variational.estimators`), `samples` of it a step.
    prior: training (the run's Gaussian prior) or scale_mixture (mixture_weight N(0, sigma1²) + the
    rest N(0, sigma2²)). norm: scale and shift of norm layers are gaussian like other weights, or
    point estimates. start: map (the MAP network's weights) or init (initial weights); rho_init: where
    ρ starts. epochs, lr: of this fit (null: those of the schedule, whose other fields hold too).
    kl_annealing: constant, linear (over the first kl_warmup of the steps) or blundell.
    likelihood_temperature T: the KL counts T times (below 1: a cold posterior). noise of regression:
    learned jointly (from the start network's, unless likelihood.noise=fixed), or kept as the start
    network has it.
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
            f"method.{name}={value} is too few. It must be 1 or more."
            for name, value in (("samples", self.samples), ("elbo_draws", self.elbo_draws), ("epochs", self.epochs))
            if value is not None and value < 1
        ]
        if not 0 < self.mixture_weight < 1:
            problems.append(f"method.mixture_weight={self.mixture_weight} is no share. It must lie between 0 and 1.")
        if not 0 < self.sigma2 <= self.sigma1 < math.inf:
            problems.append(
                f"method.sigma1={self.sigma1} and method.sigma2={self.sigma2} are no scales of a mixture. "
                "They need 0 < sigma2 <= sigma1."
            )
        if self.lr is not None and not 0 < self.lr < math.inf:
            problems.append(f"method.lr={self.lr} is not a learning rate. It must be above 0 and finite.")
        if not 0 <= self.kl_warmup <= 1:
            problems.append(f"method.kl_warmup={self.kl_warmup} is no share of the steps. It must lie in [0, 1].")
        if not 0 < self.likelihood_temperature < math.inf:
            problems.append(
                f"method.likelihood_temperature={self.likelihood_temperature} is no temperature. It must be above 0."
            )
        if not -20 <= self.rho_init <= 20:
            problems.append(
                f"method.rho_init={self.rho_init} starts at a standard deviation of exp(rho_init), nothing or far too "
                "much. Take it between -20 and 20, for example -4."
            )
        raise_all(problems)

    def problems(self, spec: TaskSpec, hyper: HyperRule | None) -> list[str]:
        return []

    def needs(self) -> list[TrainingSpec]:
        return [TrainingSpec(0, trained=self.start == "map")]

    def decided(self, task: Task, network: Network) -> BBB:
        """As it is timed on a few points, on which the KL counts so much that the real rate could diverge."""
        return replace(self, lr=1e-12)

    def fit(self, task: Task, networks: Sequence[Network], context: FitContext) -> MeanField:
        network = networks[0]
        seed = derive_seed(context.seed, "bbb")
        fit = self.begin(task, network, context.schedule, seed, learn_noise=not context.noise_fixed)
        has_batchnorm = any(isinstance(m, nn.modules.batchnorm._BatchNorm) for m in network.module.modules())
        if has_batchnorm and min(b - a for a, b in fit.bounds) < 2:
            raise UserError(
                "a training batch of one point cannot be batch-normalised. Raise schedule.batch_size, or use another "
                "norm."
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
            note = "batchnorm statistics: running averages of the variational training, for all draws"
            report = report.extended({}, [note])
        return replace(posterior, report=report)

    def begin(self, task: Task, network: Network, schedule: Schedule, seed: int, learn_noise: bool = True) -> Fit:
        """The fit before its first step; the noise is learned if the method wants it and `learn_noise` lets it."""
        owners = {n: network.module.get_submodule(n.rpartition(".")[0]) for n in network.parameters}
        norms = {n for n, owner in owners.items() if isinstance(owner, _NORMS)}
        epochs = self.epochs or schedule.epochs
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
                f"the training prior of {name} has precision 0, under which the KL is infinite. Set prior.precision "
                "above 0, or use method.prior=scale_mixture."
            )
        return GaussianPrior(precision)

    @torch.no_grad()
    def _report(self, task: Task, posterior: MeanField, fit: Fit) -> FitReport:
        """The ELBO in nats of the data set (original target units): the mean over draws and its standard error."""
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
        spread = torch.cat([s.flatten() for s in posterior.sigmas.values()])
        note = f"ELBO {float(elbos.mean()):.2f} ± {error:.2f} nats for the data set (KL {float(kls.mean()):.2f})"
        if self.likelihood_temperature != 1:
            note += f"; fitted with the KL counted {self.likelihood_temperature:g} times"
        facts = {
            "elbo_nats": float(elbos.mean()),
            "elbo_standard_error": error,
            "expected_loglik_nats": float(logliks.mean()),
            "kl_nats": float(kls.mean()),
            "likelihood_temperature": self.likelihood_temperature,
            "weights_with_spread": len(spread),
            "median_sigma": float(spread.median()),
            "last_epoch": fit.history[-1] if fit.history else {},
        }
        return FitReport(facts, (note,))
