"""Stochastic-gradient MCMC: SGLD, preconditioned SGLD, SGHMC, and their cyclical versions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import ClassVar, Literal

import torch
from torch import Tensor

from bnn_runner.base import FitContext, HyperRule, Network, Predictive, TrainingSpec
from bnn_runner.errors import UserError, raise_all
from bnn_runner.mcmc.chains import ChainBatches, Dynamics, run_stochastic
from bnn_runner.mcmc.checkpoint import Checkpoint
from bnn_runner.mcmc.dynamics import ChainState, hamiltonian, langevin, preconditioned
from bnn_runner.mcmc.initialisation import (
    Start,
    check_memory,
    largest_curvature,
    mean_square_gradient,
    refusals,
    starting_networks,
    starting_specs,
)
from bnn_runner.mcmc.posterior import ChainPosterior, treatment
from bnn_runner.mcmc.steps import Cyclical, Polynomial, StepSizes, evenly_kept
from bnn_runner.mcmc.summary import summarise
from bnn_runner.mcmc.target import LogPosterior
from bnn_runner.models.likelihoods import noise_advice
from bnn_runner.posteriors.function_diversity import probe_points
from bnn_runner.rng import derive_seed
from bnn_runner.runtime.devices import thread_count
from bnn_runner.runtime.torch_state import evaluation_mode, true_float32
from bnn_runner.tasks import Task, TaskSpec
from bnn_runner.training.engine import SMALL_STEP
from bnn_runner.training.schedules import Schedule

CURVATURE_POINTS = 1024
SOURCES = {"langevin": "welling2011", "preconditioned": "li2016", "hamiltonian": "chen2014"}


@dataclass(frozen=True)
class StochasticGradientMCMC:
    """Chains over the weights from minibatch gradients of the log posterior.

    The target is the posterior to the power 1/posterior_temperature. Without cycles the step decays polynomially, and
    draws are weighted by the time of their step.

    Attributes:
        dynamics: langevin (SGLD, Welling & Teh 2011), preconditioned (pSGLD, Li et al. 2016, without Γ), or
            hamiltonian (SGHMC, Chen et al. 2014).
        chains: number of chains.
        length: of a chain, in units of schedule.epochs.
        burn_in: share of the chain without draws.
        keep: draws of all chains together, evenly spaced.
        batch_size: None is the schedule's.
        step: ε on the log posterior (η for SGHMC), which is learning rate εN/2 (ηN) on the mean objective of
            training. None sets it from the curvature at the start, so that in the stiffest direction discretisation
            and minibatch noise add about a tenth of the variance each (preconditioned: learning rate 5e-4, as in the
            paper's experiments).
        last_fraction: last step, relative to the first.
        gamma: power of the decay.
        cycles: above 0, the step is cyclical (Zhang et al. 2020).
        explore: first share of each cycle, without noise and draws.
        friction: of SGHMC.
        decay: of the running mean of pSGLD's squared gradients.
        floor: added to their root.
        posterior_temperature: T.
        start: where chains start (see `initialisation.Start`).
        max_gigabytes: memory limit of the draws.
    """

    dynamics: Literal["langevin", "preconditioned", "hamiltonian"] = "langevin"
    chains: int = 4
    length: float = 10.0
    burn_in: float = 0.2
    keep: int = 1000
    batch_size: int | None = None
    step: float | None = None
    last_fraction: float = 0.1
    gamma: float = 0.55
    cycles: int = 0
    explore: float = 0.5
    friction: float = 0.1
    decay: float = 0.99
    floor: float = 1e-5
    posterior_temperature: float = 1.0
    start: Start = "members"
    max_gigabytes: float = 4.0
    finite: ClassVar[bool] = False
    uses_hyper: ClassVar[bool] = False
    predictive: ClassVar[Predictive] = "draws"

    def __post_init__(self) -> None:
        rules = {
            "chains": (self.chains >= 1, "at least 1"),
            "length": (self.length > 0, "positive (it multiplies schedule.epochs)"),
            "burn_in": (0 <= self.burn_in < 1, "in [0, 1) (a share of the chain)"),
            "keep": (self.keep >= self.chains, "at least method.chains, one draw for each chain"),
            "batch_size": (self.batch_size is None or self.batch_size >= 1, "at least 1, or null"),
            "step": (self.step is None or 0 < self.step < float("inf"), "positive and finite, or null"),
            "last_fraction": (0 < self.last_fraction <= 1, "in (0, 1]"),
            "gamma": (0 < self.gamma <= 1, "in (0, 1]"),
            "cycles": (self.cycles >= 0, "at least 0"),
            "explore": (0 <= self.explore < 1, "in [0, 1) (a share of each cycle)"),
            "friction": (0 < self.friction <= 1, "in (0, 1]"),
            "decay": (0 <= self.decay < 1, "in [0, 1)"),
            "floor": (self.floor > 0, "positive"),
            "posterior_temperature": (self.posterior_temperature > 0, "positive"),
            "max_gigabytes": (self.max_gigabytes > 0, "positive"),
        }
        raise_all(refusals(self, rules))

    @property
    def cites(self) -> tuple[str, ...]:
        return (SOURCES[self.dynamics], *(("zhang2020",) if self.cycles else ()), "vehtari2021")

    def problems(self, spec: TaskSpec, hyper: HyperRule | None) -> list[str]:
        return []

    def needs(self) -> list[TrainingSpec]:
        return starting_specs(self.start, self.chains)

    def own_epochs(self, schedule: Schedule) -> int:
        """Of one chain."""
        return max(1, round(self.length * schedule.epochs))

    def fit(self, task: Task, networks: Sequence[Network], context: FitContext) -> ChainPosterior:
        size = networks[0].num_parameters
        gigabytes = check_memory(self.keep, size, self.max_gigabytes)
        batch_size = min(self.batch_size or context.schedule.batch_size, len(task.train))
        on_cpu = networks[0].parameters[next(iter(networks[0].parameters))].device.type == "cpu"
        small = on_cpu and self.chains * size * batch_size < SMALL_STEP
        with true_float32(), thread_count(1 if small else None), evaluation_mode(networks[0].module):
            return self._fit(task, networks, context, batch_size, gigabytes)

    def _fit(
        self, task: Task, networks: Sequence[Network], context: FitContext, batch_size: int, gigabytes: float
    ) -> ChainPosterior:
        reference, count = networks[0], len(task.train)
        dtype = next(iter(reference.parameters.values())).dtype
        target = LogPosterior(starting_networks(self.start, self.chains, networks), reference, count, dtype)
        seeds = [derive_seed(context.seed, "chain", i) for i in range(self.chains)]
        batches = ChainBatches(task.train, seeds, batch_size)
        total = self.own_epochs(context.schedule) * len(batches.bounds)
        steps = self._steps(self._first_step(target, task, batch_size, context), total)
        kept = evenly_kept(steps, int(self.burn_in * total), total, self.keep // self.chains)
        if not kept:
            raise UserError(
                f"The chains must keep at least one draw; burn-in and exploration take all {total} steps. "
                "Raise method.length, or lower method.burn_in or method.cycles."
            )

        def gradients(position: Tensor, t: int) -> tuple[Tensor, Tensor]:
            return target(position, *batches.at(t))

        square = None
        if self.dynamics == "preconditioned":
            square = mean_square_gradient(target, task.train, context.seed)
        identity = f"{self} {context.seed} {task.fingerprint} {tuple(target.start.shape)} {total} {batch_size}"
        chains = run_stochastic(
            gradients,
            self._dynamics(count),
            ChainState.at(target.start, square),
            steps,
            kept,
            total,
            self.posterior_temperature,
            seeds,
            Checkpoint(context.checkpoint, identity),
            context.progress,
            noise_advice(getattr(reference.likelihood, "log_noise", None)) if context.noise_fixed else "",
        )
        classes = task.spec.kind == "classification"
        remedy = "Raise method.length or method.step; until then the uncertainty is not reliable."
        x = probe_points(task.test, dtype)
        facts = {
            "step_first": steps.at(0),
            "step_last": steps.at(total - 1),
            "learning_rate_first": steps.at(0) * count * (1.0 if self.dynamics == "hamiltonian" else 0.5),
            "steps_per_chain": total,
            "thinning": kept[1] - kept[0] if len(kept) > 1 else None,
            "batch_size": batch_size,
            "posterior_temperature": self.posterior_temperature,
            "log_posterior_mean": float(chains.values.mean()),
            "draws_gigabytes": gigabytes,
        }
        notes = []
        if (have := len(kept) * self.chains) < self.keep // self.chains * self.chains:
            notes.append(f"{have} of {self.keep} draws are kept: the chains have no more steps that sample")
        report = summarise(target, chains.weights, x, classes, remedy).extended(facts, notes)
        return ChainPosterior(
            module=reference.module,
            layout=target.layout,
            weights=chains.weights,
            buffers=target.buffers,
            log_weights=torch.tensor([steps.log_weight(t) for t in kept], dtype=torch.float64),
            likelihood=target.likelihood,
            report=report,
            treatment=treatment(reference, f"sampled by {self.dynamics} dynamics"),
        )

    def _first_step(self, target: LogPosterior, task: Task, batch_size: int, context: FitContext) -> float:
        if self.step is not None:
            return self.step
        count = len(task.train)
        if self.dynamics == "preconditioned":
            return 2 * 5e-4 / count
        x, y = task.train.gather(torch.arange(min(count, CURVATURE_POINTS)).expand(self.chains, -1))
        assert y is not None
        curvature = largest_curvature(lambda w: target(w, x, y)[1], target.start, context.seed)
        # Minibatch noise adds ε λ (N/B − 1) / 4 to the variance of the stiffest direction, for SGHMC ηλ(N/B − 1) / 2α.
        noise = (count / batch_size - 1) * (2 / self.friction if self.dynamics == "hamiltonian" else 1)
        # A cycle ends with step size 0, so it may start with a larger one.
        return (1.6 if self.cycles else 0.4) / (curvature * (1 + noise))

    def _steps(self, first: float, total: int) -> StepSizes:
        if self.cycles:
            return Cyclical(first, self.cycles, total, self.explore)
        power = 0.5 if self.dynamics == "hamiltonian" else 1.0
        return Polynomial(first, first * self.last_fraction, self.gamma, total, power)

    def _dynamics(self, num_points: int) -> Dynamics:
        if self.dynamics == "hamiltonian":
            return partial(hamiltonian, friction=self.friction)
        if self.dynamics == "preconditioned":
            return partial(preconditioned, num_points=num_points, decay=self.decay, floor=self.floor)
        return langevin
