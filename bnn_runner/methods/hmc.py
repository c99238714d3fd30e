"""Full-batch Hamiltonian Monte Carlo in float64: the reference for every other method, for small networks."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from bnn_runner.base import FitContext, HyperRule, Network, Predictive, TrainingSpec
from bnn_runner.errors import UserError, raise_all
from bnn_runner.mcmc.chains import run_hamiltonian
from bnn_runner.mcmc.checkpoint import Checkpoint
from bnn_runner.mcmc.initialisation import Start, check_memory, refusals, starting_networks, starting_specs
from bnn_runner.mcmc.posterior import ChainPosterior, treatment
from bnn_runner.mcmc.summary import summarise
from bnn_runner.mcmc.target import LogPosterior
from bnn_runner.posteriors.function_diversity import probe_points
from bnn_runner.rng import derive_seed
from bnn_runner.runtime.devices import thread_count
from bnn_runner.runtime.torch_state import evaluation_mode
from bnn_runner.tasks import Task, TaskSpec
from bnn_runner.training.engine import SMALL_STEP

MOST_PARAMETERS = 20_000


@dataclass(frozen=True)
class HMC:
    """HMC (Neal 2011) with dual-averaging step sizes (Hoffman & Gelman 2014) and the prior precision as mass.

    The target is the posterior to the power 1/posterior_temperature, with the noise fixed at its MAP value.

    Attributes:
        chains: number of chains.
        warmup: transitions that adapt the step sizes.
        draws: per chain.
        thinning: transitions per draw.
        trajectory: length in prior standard deviations, since the mass is the prior precision; π/2 is the choice of
            Izmailov et al. (2021).
        jitter: relative, of the trajectory's length.
        max_leapfrogs: most steps per transition; longer trajectories are shortened.
        acceptance: mean acceptance probability that step sizes are adapted to.
        posterior_temperature: T.
        start: where chains start (see `initialisation.Start`).
        max_gigabytes: memory limit of the draws.
        force: run networks above 20,000 weights, which are refused otherwise.
    """

    chains: int = 4
    warmup: int = 100
    draws: int = 100
    thinning: int = 1
    trajectory: float = math.pi / 2
    jitter: float = 0.2
    max_leapfrogs: int = 200
    acceptance: float = 0.8
    posterior_temperature: float = 1.0
    start: Start = "members"
    max_gigabytes: float = 4.0
    force: bool = False
    cites: ClassVar[tuple[str, ...]] = ("neal2011", "hoffman2014", "izmailov2021", "vehtari2021")
    finite: ClassVar[bool] = False
    uses_hyper: ClassVar[bool] = False
    predictive: ClassVar[Predictive] = "draws"

    def __post_init__(self) -> None:
        rules = {
            "chains": (self.chains >= 1, "at least 1"),
            "warmup": (self.warmup >= 0, "at least 0"),
            "draws": (self.draws >= 1, "at least 1"),
            "thinning": (self.thinning >= 1, "at least 1"),
            "trajectory": (0 < self.trajectory < math.inf, "positive and finite"),
            "jitter": (0 <= self.jitter < 1, "in [0, 1) (a share of the trajectory)"),
            "max_leapfrogs": (self.max_leapfrogs >= 1, "at least 1"),
            "acceptance": (0 < self.acceptance < 1, "in (0, 1)"),
            "posterior_temperature": (self.posterior_temperature > 0, "positive"),
            "max_gigabytes": (self.max_gigabytes > 0, "positive"),
        }
        raise_all(refusals(self, rules))

    def problems(self, spec: TaskSpec, hyper: HyperRule | None) -> list[str]:
        return []

    def needs(self) -> list[TrainingSpec]:
        return starting_specs(self.start, self.chains)

    def fit(self, task: Task, networks: Sequence[Network], context: FitContext) -> ChainPosterior:
        size = networks[0].num_parameters
        if size > MOST_PARAMETERS and not self.force:
            raise UserError(
                f"method=hmc requires at most {MOST_PARAMETERS:,} weights; this network has {size:,}. Every draw takes "
                f"up to {self.max_leapfrogs} gradients over all {len(task.train):,} points in float64. Use a smaller "
                "model, another method (method=sghmc), or method.force=true."
            )
        device = next(iter(networks[0].parameters.values())).device
        if device.type == "mps":
            raise UserError("method=hmc requires float64, which device=mps does not support. Use device=cpu.")
        gigabytes = check_memory(self.chains * self.draws, size, self.max_gigabytes)
        small = device.type == "cpu" and self.chains * size * len(task.train) < SMALL_STEP
        with thread_count(1 if small else None), evaluation_mode(networks[0].module):
            return self._fit(task, networks, context, gigabytes)

    def _fit(self, task: Task, networks: Sequence[Network], context: FitContext, gigabytes: float) -> ChainPosterior:
        reference = networks[0]
        kept_as = next(iter(reference.parameters.values())).dtype
        starts = starting_networks(self.start, self.chains, networks)
        posterior = LogPosterior(starts, reference, len(task.train), torch.float64)
        train = task.train.to(posterior.start.device, torch.float64)
        x, y = train.gather(torch.arange(len(train)))
        assert y is not None
        x, y = x.expand(self.chains, *x.shape), y.expand(self.chains, *y.shape)
        temperature = self.posterior_temperature
        try:
            with torch.no_grad():
                posterior.outputs(posterior.start, x[:, :1])
        except RuntimeError as error:
            raise UserError(
                f"method=hmc runs the network in float64, where its forward pass failed: {error}. Give tensors that "
                "forward makes the dtype of its inputs (dtype=x.dtype), or use method=sghmc, which runs in float32."
            ) from error

        def target(w: Tensor) -> tuple[Tensor, Tensor]:
            value, gradient = posterior(w, x, y)
            return value / temperature, gradient / temperature

        seeds = [derive_seed(context.seed, "chain", i) for i in range(self.chains)]
        mass = torch.where(posterior.precision > 0, posterior.precision, 1.0) / temperature
        run = run_hamiltonian(
            target,
            posterior.start,
            mass,
            self.warmup,
            self.draws,
            self.thinning,
            self.trajectory,
            self.jitter,
            self.max_leapfrogs,
            self.acceptance,
            seeds,
            Checkpoint(context.checkpoint, f"{self} {context.seed} {task.fingerprint} {tuple(posterior.start.shape)}"),
            context.progress,
        )
        classes = task.spec.kind == "classification"
        remedy = "Raise method.draws, method.warmup or method.max_leapfrogs."
        points = probe_points(task.test, torch.float64)
        divergences = int(run.divergences.sum())
        facts = {
            "acceptance": run.acceptance.tolist(),
            "divergences": divergences,
            "step": run.step.tolist(),
            "leapfrogs": run.leapfrogs.tolist(),
            "posterior_temperature": temperature,
            "log_posterior_mean": float(run.chains.values.mean()) * temperature,
            "draws_gigabytes": gigabytes,
        }
        notes = []
        if divergences:
            after = self.chains * self.draws * self.thinning
            notes.append(
                f"{divergences} of {after} trajectories diverged (energy error above 1000 nats). Raise "
                "method.acceptance or method.warmup."
            )
        if float(run.acceptance.min()) < 0.5 * self.acceptance:
            notes.append(
                f"a chain accepts only {float(run.acceptance.min()):.0%} of its trajectories, far below "
                f"method.acceptance={self.acceptance:g}. Raise method.warmup."
            )
        report = summarise(posterior, run.chains.weights, points, classes, remedy).extended(facts, notes)
        return ChainPosterior(
            module=reference.module,
            layout=posterior.layout,
            weights=run.chains.weights.to(kept_as),
            buffers={n: b.to(kept_as) if b.is_floating_point() else b for n, b in posterior.buffers.items()},
            log_weights=torch.zeros(self.draws, dtype=torch.float64),
            likelihood=reference.likelihood,
            report=report,
            treatment=treatment(reference, "sampled by HMC"),
        )
