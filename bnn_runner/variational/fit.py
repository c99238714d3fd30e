"""Training of a factorised Gaussian over weights: minibatch ascent of the ELBO, with checkpoints.

Every step minimises  mean over the batch of −log p / samples  +  (β T / N) KL,  which is −ELBO/N when
β = T = 1: the KL counts once for the data set, whatever the batch size. T is the likelihood temperature; β
follows the annealing schedule. All noise of step t comes from the stream (seed, t), so that a resumed fit gives
bit for bit the result of an uninterrupted one, at equal threads.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.func import functional_call

from bnn_runner.base import FitContext, Likelihood, Network
from bnn_runner.errors import Interrupted, RunFailed
from bnn_runner.models.likelihoods import Gaussian
from bnn_runner.models.random_layers import draws_random_numbers
from bnn_runner.models.weight_reads import PROBED_POINTS
from bnn_runner.rng import derive_seed, generator, global_stream
from bnn_runner.runtime.files import write_torch
from bnn_runner.runtime.torch_state import training_mode
from bnn_runner.tasks import Task
from bnn_runner.training.engine import CHECKPOINT_SECONDS, batch_bounds
from bnn_runner.training.optimizers import make_optimizer
from bnn_runner.training.schedules import Schedule
from bnn_runner.variational.estimators import Estimator, Layer, matrix_layers, noisy_outputs
from bnn_runner.variational.kl import KLTerm

Annealing = Literal["constant", "linear", "blundell"]
Tensors = dict[str, Tensor]


@dataclass(frozen=True)
class Plan:
    """How the ELBO is maximised.

    Attributes:
        schedule: of the optimiser.
        estimator: of the gradient.
        samples: of it per step.
        annealing: of the KL's weight: constant; linear over the first `warmup` of all steps; blundell: batch i of M
            gets the share 2^(M−i)/(2^M − 1) (Blundell et al. 2015, §3.4), which sums to one per epoch.
        warmup: share of all steps, for linear annealing.
        temperature: T.
        rho: start of ρ, σ = softplus ρ.
        learn_noise: whether the regression noise is optimised too.
        complexities: KL term of every tensor.
        point: tensors that stay point estimates.
    """

    schedule: Schedule
    estimator: Estimator
    samples: int
    annealing: Annealing
    warmup: float
    temperature: float
    rho: float
    learn_noise: bool
    complexities: Mapping[str, KLTerm]
    point: frozenset[str]

    def kl_weight(self, step: int, per_epoch: int) -> float:
        """β of update `step` (from 0)."""
        if self.annealing == "blundell":
            i = step % per_epoch + 1
            return per_epoch * 2.0**-i / (1 - 2.0**-per_epoch)
        ramp = self.warmup * self.schedule.epochs * per_epoch
        return min(1.0, (step + 1) / ramp) if self.annealing == "linear" and ramp > 0 else 1.0


@dataclass
class Fit:
    """The state of a fit: means, ρ (σ = softplus ρ), buffers, log noise, optimiser, step."""

    task: Task
    network: Network
    plan: Plan
    seed: int
    step: int = 0
    history: list[dict[str, float]] = field(default_factory=list)

    def __post_init__(self) -> None:
        network, plan = self.network, self.plan
        self.module = network.module
        self.mu = {n: p.detach().clone() for n, p in network.parameters.items()}
        self.rho = {n: torch.full_like(p, plan.rho) for n, p in self.mu.items() if n not in plan.point}
        self.buffers = {n: b.clone() for n, b in network.buffers.items()}
        gaussian = network.likelihood if isinstance(network.likelihood, Gaussian) else None
        self.log_noise = None if gaussian is None else gaussian.log_noise.detach().clone()
        self.device = next(iter(self.mu.values())).device
        self.bounds = batch_bounds(len(self.task.train), plan.schedule.batch_size)
        self.layers: dict[str, Layer] = {}
        x, _ = self.task.train.gather(torch.arange(min(PROBED_POINTS, len(self.task.train))))
        self._random = draws_random_numbers(self.module, network.tensors, x[:2])
        if plan.estimator != "weights":
            self.layers = matrix_layers(self.module, network.tensors, x)
        self.hooked = {f"{n}.{kind}" for n in self.layers for kind in ("weight", "bias")} & self.rho.keys()
        # A layer whose matrix is a point estimate adds no noise.
        self.hooked = {n for n in self.hooked if f"{n.rpartition('.')[0]}.weight" in self.rho}
        self.learned = self.log_noise if plan.learn_noise else None
        self.moved = [*self.mu.values(), *self.rho.values(), *([] if self.learned is None else [self.learned])]
        self.optimizer = make_optimizer(plan.schedule, self.moved, [0.0] * len(self.moved))
        self.nll_sum = torch.zeros((), dtype=torch.float64 if self.device.type == "cpu" else torch.float32)
        self.nll_sum = self.nll_sum.to(self.device)
        self._order: tuple[int, Tensor] | None = None
        # Fresh memory in every step would cost several times as much as the sums.
        self._sigma, self._exp, self._square = ({n: torch.empty_like(r) for n, r in self.rho.items()} for _ in range(3))

    @property
    def total_steps(self) -> int:
        return self.plan.schedule.epochs * len(self.bounds)

    def sigmas(self) -> Tensors:
        return {n: nn.functional.softplus(r) for n, r in self.rho.items()}

    @torch.no_grad()
    def _fresh_sigmas(self) -> Tensors:
        """σ = log(1 + e^ρ), and e^ρ for dσ/dρ, written into existing memory: cheaper than softplus."""
        for n, r in self.rho.items():
            torch.log1p(torch.exp(r, out=self._exp[n]), out=self._sigma[n])
        return self._sigma

    def likelihood(self) -> Likelihood:
        return self.network.likelihood if self.log_noise is None else Gaussian(self.log_noise.detach())

    def gradients(self, x: Tensor, y: Tensor, sigma: Tensors, stream: torch.Generator) -> tuple[Tensor, list[Tensor]]:
        """Mean −log p of a batch under one draw of the noise, and its gradients in μ, σ and log noise."""
        local = self.plan.estimator == "local"
        with torch.no_grad():
            eps = {n: _normal(s, stream) for n, s in sigma.items() if not (local and n in self.hooked)}
            values = dict(self.mu)
            scales = {}
            for n, s in sigma.items():
                if n not in self.hooked:
                    values[n] = torch.addcmul(self.mu[n], s, eps[n])
                else:
                    scales[n] = torch.square(s, out=self._square[n]) if local else s * eps[n]
        leaves = [t.detach().requires_grad_() for t in (*values.values(), *scales.values())]
        values, scales = (
            dict(zip(values, leaves[: len(values)], strict=True)),
            dict(zip(scales, leaves[len(values) :], strict=True)),
        )
        likelihood = self.network.likelihood
        if self.log_noise is not None:
            log_noise = self.log_noise.detach().requires_grad_(self.learned is not None)
            likelihood = Gaussian(log_noise)
            leaves += [log_noise] if self.learned is not None else []
        with torch.enable_grad(), noisy_outputs(self.layers, self.plan.estimator, scales, stream):
            outputs = functional_call(self.module, values | self.buffers, (x,))
            nll = -likelihood.log_prob(outputs, y).mean()
        grads = list(torch.autograd.grad(nll, leaves, materialize_grads=True))
        mus = dict(zip(values, grads, strict=False))
        scale_grads = dict(zip(scales, grads[len(values) :], strict=False))
        found = [mus[n].contiguous() for n in self.mu]
        for n in sigma:
            if n not in self.hooked:
                found.append(mus[n] * eps[n])
            elif local:
                found.append(scale_grads[n].contiguous().mul_(sigma[n]).mul_(2))
            else:
                found.append(scale_grads[n].contiguous().mul_(eps[n]))
        return nll.detach(), found + grads[len(values) + len(scales) :]

    def update(self) -> Tensor:
        """Take one step; the mean −log p of its batch."""
        plan, per_epoch = self.plan, len(self.bounds)
        epoch, position = divmod(self.step, per_epoch)
        begin, end = self.bounds[position]
        x, y = self.task.train.gather(self._epoch_order(epoch)[begin:end])
        assert y is not None
        stream = torch.Generator(self.device).manual_seed(derive_seed(self.seed, "bbb", self.step))
        sigma = self._fresh_sigmas()
        with self._own_stream():
            nll, grads = self.gradients(x, y, sigma, stream)
            for _ in range(plan.samples - 1):
                more, others = self.gradients(x, y, sigma, stream)
                nll = nll + more
                for grad, other in zip(grads, others, strict=True):
                    grad.add_(other)
        if plan.samples > 1:
            nll = nll / plan.samples
            for grad in grads:
                grad.div_(plan.samples)
        weight = plan.temperature * plan.kl_weight(self.step, per_epoch) / len(self.task.train)
        with torch.no_grad():
            self._add_complexity(grads, sigma, weight, stream)
            for grad, e in zip(grads[len(self.mu) :], self._exp.values(), strict=False):
                grad.mul_(e).div_(e.add_(1))  # dσ/dρ = e^ρ / (1 + e^ρ)
            self.optimizer.step(self.moved, grads, plan.schedule.lr_at(self.step, per_epoch))
        self.nll_sum += nll * (end - begin)
        self.step += 1
        return nll

    def _own_stream(self) -> AbstractContextManager[None]:
        """The numbers that the network draws itself in this step (its own dropout), if it does."""
        if not self._random:
            return nullcontext()
        return global_stream(self.seed, "random layers", self.step, device=self.device)

    def _add_complexity(self, grads: list[Tensor], sigma: Tensors, weight: float, stream: torch.Generator) -> None:
        places = {n: len(self.mu) + i for i, n in enumerate(sigma)}
        for i, (name, mu) in enumerate(self.mu.items()):
            complexity = self.plan.complexities[name]
            if name not in sigma:  # a point estimate: −log prior at it
                nothing = torch.zeros_like(mu)
                complexity.add_gradients(weight, mu, torch.ones_like(mu), nothing, grads[i], nothing.clone())
                continue
            eps = _normal(mu, stream) if complexity.needs_eps else mu
            complexity.add_gradients(weight, mu, sigma[name], eps, grads[i], grads[places[name]])

    def _epoch_order(self, epoch: int) -> Tensor:
        if self._order is None or self._order[0] != epoch:
            order = torch.randperm(len(self.task.train), generator=generator(self.seed, "bbb order", epoch))
            self._order = epoch, order.to(self.device)
        return self._order[1]

    def kl(self, stream: torch.Generator) -> float:
        """KL(q ‖ prior) in nats: exact, or estimated by one sample where the prior is a mixture."""
        total = 0.0
        for name, s in self.sigmas().items():
            total += float(self.plan.complexities[name].value(self.mu[name], s, _normal(s, stream)))
        return total

    # ------------------------------------------------------------------------------ checkpoint

    def save(self, path: Path) -> None:
        payload = {
            "moved": self.moved,
            "buffers": self.buffers,
            "optimizer": self.optimizer.state,
            "step": self.step,
            "nll_sum": self.nll_sum,
            "history": self.history,
        }
        write_torch(path, payload)

    def load(self, path: Path) -> bool:
        """Resume from a checkpoint; False where none can be read (then training starts from the beginning)."""
        try:
            saved: dict[str, Any] = torch.load(path, map_location=self.device, weights_only=True)
            pairs = [(self.moved, saved["moved"]), (self.optimizer.state, saved["optimizer"])]
            if any([t.shape for t in a] != [t.shape for t in b] for a, b in pairs):
                return False
        except Exception:  # missing or unreadable
            return False
        for mine, theirs in pairs:
            for a, b in zip(mine, theirs, strict=True):
                a.copy_(b)
        for name, b in self.buffers.items():
            b.copy_(saved["buffers"][name])
        self.step, self.nll_sum, self.history = saved["step"], saved["nll_sum"], saved["history"]
        return True


def run(fit: Fit, context: FitContext) -> None:
    """Train to the end of the schedule.

    Raises:
        RunFailed: the objective or a weight is not finite.
    """
    if context.checkpoint is not None:
        fit.load(context.checkpoint)
    per_epoch, saved_at = len(fit.bounds), time.perf_counter()
    with training_mode(fit.module):
        while fit.step < fit.total_steps:
            nll = fit.update()
            ends_epoch = fit.step % per_epoch == 0
            if (ends_epoch or fit.device.type == "cpu" or fit.step % 50 == 0) and not math.isfinite(float(nll)):
                raise RunFailed(
                    f"variational training diverged: the objective became {float(nll)} at step {fit.step} (epoch "
                    f"{(fit.step - 1) // per_epoch + 1}). Lower method.lr (now {fit.plan.schedule.lr:g}) or "
                    f"method.rho_init (now {fit.plan.rho:g}, the initial noise)."
                )
            if ends_epoch:
                _record(fit, fit.step // per_epoch)
            try:
                context.progress("variational training", fit.step, fit.total_steps)
            except Interrupted:
                if context.checkpoint is not None:
                    fit.save(context.checkpoint)
                raise
            if context.checkpoint is not None and ends_epoch and time.perf_counter() - saved_at > CHECKPOINT_SECONDS:
                fit.save(context.checkpoint)
                saved_at = time.perf_counter()
    if not all(bool(torch.isfinite(t).all()) for t in fit.moved):
        raise RunFailed("variational training diverged: a weight is not finite after the last update. Lower method.lr.")


def _record(fit: Fit, epoch: int) -> None:
    nll = float(fit.nll_sum) / len(fit.task.train)
    kl = fit.kl(torch.Generator(fit.device).manual_seed(derive_seed(fit.seed, "bbb kl", epoch)))
    fit.history.append({"epoch": epoch, "nll": nll, "kl": kl, "loss": nll + kl / len(fit.task.train)})
    fit.nll_sum.zero_()


def _normal(like: Tensor, stream: torch.Generator) -> Tensor:
    return torch.randn(like.shape, generator=stream, dtype=like.dtype, device=like.device)
