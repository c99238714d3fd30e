"""The training engine: trains L networks at once, with one optimiser step for all of them.

Every lane minimises  mean over its batch of −log p  +  (1/2N) wᵀΛw.  The gradient of the penalty, Λw/N, is added to
the gradient of the first term. Adam and SGD are elementwise, so a lane does not depend on the other lanes.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import cached_property
from itertools import pairwise
from pathlib import Path

import torch
from torch import Tensor, nn

from bnn_runner.base import Network
from bnn_runner.errors import Interrupted, UserError
from bnn_runner.models.random_layers import draws_random_numbers
from bnn_runner.models.weight_reads import PROBED_POINTS
from bnn_runner.rng import generator, global_stream
from bnn_runner.runtime.console import Progress
from bnn_runner.training.augmentation import Unchanged
from bnn_runner.training.divergence import check_loss, check_weights
from bnn_runner.training.lanes import Forward, Strategy, Tensors, choose_strategy, concatenate, lane_forward, seconds_of
from bnn_runner.training.noise_layers import StepNoise, check_noise_layers
from bnn_runner.training.state import Lane, TrainingConfig, initial_state, residual_log_noise

CHECKPOINT_SECONDS = 10.0
SMALL_STEP = 4_000_000
"""Multiplications of a forward pass below which one thread is faster than several."""


def batch_bounds(num_points: int, batch_size: int) -> list[tuple[int, int]]:
    """Returns the bounds (begin, end) of the batches; their sizes differ by at most one, and no point is dropped."""
    count = math.ceil(num_points / batch_size)
    edges = [round(i * num_points / count) for i in range(count + 1)]
    return list(pairwise(edges))


def _laid_out(grad: Tensor | None, parameter: Tensor) -> Tensor:
    """The gradient in its parameter's memory layout, which the fused update assumes; zero for an unused parameter."""
    if grad is None:
        return torch.zeros_like(parameter)
    return grad if grad.stride() == parameter.stride() else torch.empty_like(parameter).copy_(grad)


class LaneTrainer:
    """Trains a group of lanes: networks of one architecture with equal numbers of training points.

    Raises:
        ValueError: If the lanes have different numbers of training points.
        UserError: If there are no training points, or a batch is too small for batch normalisation.
    """

    def __init__(self, config: TrainingConfig, lanes: Sequence[Lane], device: torch.device) -> None:
        sizes = {len(lane.task.train) for lane in lanes}
        if len(sizes) != 1:
            raise ValueError(f"all lanes of a group must have the same number of points; got {sorted(sizes)}")
        if sizes == {0}:
            raise UserError("The training part is empty. Lower data.val_fraction or raise data.train_size.")
        self.config, self.lanes, self.device = config, lanes, device
        self.num_points = sizes.pop()
        self.bounds = batch_bounds(self.num_points, config.schedule.batch_size)
        self.module, self.state = initial_state(config, lanes, device)
        self.prior = config.precisions(self.module)
        has_batchnorm = any(isinstance(m, nn.modules.batchnorm._BatchNorm) for m in self.module.modules())
        if has_batchnorm and min(b - a for a, b in self.bounds) < 2:
            raise UserError(
                f"Batch normalisation requires at least 2 points per batch; got a batch of 1 ({self.num_points} "
                f"training points, schedule.batch_size={config.schedule.batch_size}). Change schedule.batch_size, "
                "or use another norm."
            )
        self._noise: StepNoise | None = None
        if config.noise_transform is not None:
            largest = max(b - a for a, b in self.bounds)
            self._noise = StepNoise(config.noise_transform, self.module, [lane.seed for lane in lanes], largest, device)
        self.data, self.offsets = concatenate([lane.task.train for lane in lanes])
        self._random = self._check_module()
        # With a training rule, every lane has its own prior and may end at a different step. Lanes of a network with
        # random layers of its own are trained alone, so that each has its own stream.
        stack = "never" if self._random or config.rule is not None else config.stack
        self.strategy: Strategy = choose_strategy(self.module, len(lanes), device, stack, self._probe)
        self._drawn: tuple[int, Tensor, Tensor] | None = None
        self._base_prior = config.prior.precisions(self.module)
        self._detached = [t.detach() for t in self.state.trained]

    @cached_property
    def total_epochs(self) -> int:
        """Epochs of the schedule, or as the training rule sets them."""
        rule, schedule = self.config.rule, self.config.schedule
        return schedule.epochs if rule is None else rule.epochs(schedule)

    @cached_property
    def total_steps(self) -> int:
        """Updates of the whole training."""
        return self.total_epochs * len(self.bounds)

    def _lr_at(self, step: int) -> float:
        rule, schedule = self.config.rule, self.config.schedule
        per_epoch = len(self.bounds)
        return schedule.lr_at(step, per_epoch) if rule is None else rule.lr_at(schedule, step, per_epoch)

    def threads(self) -> int | None:
        """Returns 1 for a group so small that a second thread costs more than it saves; None to leave the setting."""
        multiplications = sum(p.numel() for p in self.state.parameters.values()) * min(
            self.config.schedule.batch_size, self.num_points
        )
        return 1 if self.device.type == "cpu" and multiplications < SMALL_STEP else None

    def step_seconds(self) -> float:
        """Measures the seconds of one step of all lanes. It changes the weights, so use a separate trainer."""
        with self.training_mode():
            return seconds_of(self.advance, self.device) / 3

    def _epoch(self, epoch: int) -> tuple[Tensor, Tensor]:
        """Every lane's data order in an epoch, [L, N], and the augmentation of each point in that order, [L, N, F]."""
        if self._drawn is None or self._drawn[0] != epoch:
            image, augment = self.lanes[0].task.spec.input_shape, self.config.augment
            orders, augmentations = [], []
            for lane in self.lanes:
                orders.append(torch.randperm(self.num_points, generator=generator(lane.seed, "order", epoch)))
                if not isinstance(augment, Unchanged):
                    stream = generator(lane.seed, "augment", epoch)
                    augmentations.append(augment.choose(self.num_points, image, stream))
            order = torch.stack(orders) + self.offsets
            augmentation = torch.stack(augmentations) if augmentations else torch.empty(*order.shape, 0).long()
            self._drawn = epoch, order.to(self.device), augmentation.to(self.device)
        return self._drawn[1:]

    def _probe(self, strategy: Strategy) -> float:
        """Seconds of a training step under a strategy: of one lane ("single") or of all."""
        lanes = self.lanes[:1] if strategy == "single" else self.lanes
        return LaneTrainer(replace(self.config, stack="always"), lanes, self.device).step_seconds()

    def _check_module(self) -> bool:
        """Whether the network draws random numbers in training (its own dropout); checks its noise layers too."""
        tensors = {n: t[0].detach() for n, t in (self.state.parameters | self.state.buffers).items()}
        few = torch.arange(min(PROBED_POINTS, self.num_points))
        x = self.data.gather(few.expand(1, -1).to(self.device))[0][0]
        if self._noise is not None:
            check_noise_layers(self.module, tensors, x)
        return draws_random_numbers(self.module, tensors, x[:2])

    def _nll(self, outputs: Tensor, y: Tensor | None, log_noise: Tensor | None) -> Tensor:
        """Mean −log p of each lane's batch, [L]."""
        assert y is not None
        if self.lanes[0].task.spec.kind == "classification" and len(self.lanes) == 1:
            # The same in one call; it saves a tenth of a small network's step.
            return nn.functional.cross_entropy(outputs.squeeze(0), y.squeeze(0)).unsqueeze(0)
        noise = torch.zeros(1, device=outputs.device) if log_noise is None else log_noise.unsqueeze(-2)
        return -self.config.noise.likelihood(self.lanes[0].task.spec.kind, noise).log_prob(outputs, y).mean(-1)

    def _outputs(self, x: Tensor, noise: Tensors) -> Tensor:
        """Network outputs [L, B, K] in the working dtype; random layers draw from the stream (lane seed, step)."""
        if self._random:
            with global_stream(self.lanes[0].seed, "random layers", self.state.step, device=self.device):
                return self._cast_outputs(x, noise)
        return self._cast_outputs(x, noise)

    def _cast_outputs(self, x: Tensor, noise: Tensors) -> Tensor:
        if self.config.precision == "float32":
            return self._forward(x, noise)
        with torch.autocast(self.device.type, torch.bfloat16):
            outputs = self._forward(x, noise)
        return outputs.to(self.config.dtype)

    def resume(self, checkpoint: Path) -> int:
        """Resumes from a checkpoint, if there is a readable one. Returns the step (0: from the beginning)."""
        if self.state.step == 0:
            self.state.load(checkpoint, self.device)
            self._apply_precisions()
        return self.state.step

    def train(
        self, checkpoint: Path | None, progress: Progress, stop: Callable[[], bool] = lambda: False
    ) -> list[Network]:
        """Trains to the end of the schedule.

        A resumed training gives the same bits as an uninterrupted one with the same number of threads.

        Args:
            checkpoint: Path of the checkpoint; training resumes from it if it exists. None for no checkpoint.
            progress: Called after every step.
            stop: Checked after every step; if it returns true, the checkpoint is written and training stops.

        Returns:
            One network per lane.

        Raises:
            Diverged: At the first non-finite loss, or if the final weights are not finite.
            Interrupted: If `stop()` returned true.
            ValueError: For the strategy 'loop': these lanes need one trainer each.
        """
        if self.strategy == "loop":
            raise ValueError("lanes with the strategy 'loop' must be trained one by one, with one trainer each")
        state = self.state
        if checkpoint is not None:
            self.resume(checkpoint)
        clock, last_saved = time.perf_counter(), time.perf_counter()
        per_epoch = len(self.bounds)
        with self.training_mode():
            while state.step < self.total_steps and not (state.tuning is not None and state.tuning.converged):
                epoch, position = divmod(state.step, per_epoch)
                begin, end = self.bounds[position]
                nll = self.advance()
                state.nll_sum.add_(nll, alpha=end - begin)
                ends_epoch = position == per_epoch - 1
                if ends_epoch or self.device.type == "cpu" or state.step % 50 == 0:
                    check_loss(nll, state.step, per_epoch, self.config.schedule.lr, self._given_noise)
                if ends_epoch:
                    state.seconds += time.perf_counter() - clock
                    clock = time.perf_counter()
                    self._record_epoch(epoch, self._lr_at(state.step - 1))
                    self._tune(epoch + 1)
                progress("training", state.step, self.total_steps)
                stopping = stop()
                if checkpoint is not None and (
                    stopping or (ends_epoch and time.perf_counter() - last_saved > CHECKPOINT_SECONDS)
                ):
                    state.save(checkpoint)
                    last_saved = time.perf_counter()
                if stopping:
                    done = f"{state.step / per_epoch:.1f} of {self.total_epochs} epochs"
                    raise Interrupted(f"training stopped after {done}")
            state.seconds += time.perf_counter() - clock  # the last update of the prior
            self._restore_best()
            floats = (b for b in state.buffers.values() if b.is_floating_point())
            check_weights([*state.parameters.values(), *floats], state.step, self.config.schedule.lr, self._given_noise)
        return [self.network(i) for i in range(len(self.lanes))]

    @contextmanager
    def training_mode(self) -> Iterator[None]:
        """Sets training mode, gradients on and the number of threads (see `threads`); restores all of them."""
        was_training = self.module.training
        self.module.train()
        previous_threads = torch.get_num_threads()
        try:
            torch.set_num_threads(self.threads() or previous_threads)
            with torch.enable_grad():  # a caller may have turned them off
                yield
        finally:
            torch.set_num_threads(previous_threads)
            self.module.train(was_training)

    def advance(self) -> Tensor:
        """Updates every lane once (inside `training_mode`).

        Batch, noise and learning rate depend only on the current step.

        Returns:
            Mean −log p of each lane's batch before the update, [L].
        """
        state, per_epoch = self.state, len(self.bounds)
        epoch, position = divmod(state.step, per_epoch)
        begin, end = self.bounds[position]
        order, augmentation = self._epoch(epoch)
        x, y = self.data.gather(order[:, begin:end])
        if position + 1 < per_epoch:
            self.data.ahead(order[:, slice(*self.bounds[position + 1])])
        if augmentation.shape[-1]:
            x = self.config.augment(x.flatten(0, 1), augmentation[:, begin:end].flatten(0, 1)).view(x.shape)
        lr = self._lr_at(state.step)
        noise = {} if self._noise is None else self._noise.at(state.step, end - begin)
        nll = self._nll(self._outputs(x, noise), y, state.log_noise)
        objective = nll if len(self.lanes) == 1 else nll.sum()  # a single lane needs no sum
        if (penalty := self._penalty()) is not None:
            objective = objective + penalty.sum() / self.num_points
        grads = torch.autograd.grad(objective, state.trained, allow_unused=True)
        with torch.no_grad():
            laid_out = [_laid_out(g, p) for g, p in zip(grads, self._detached, strict=True)]
            self._add_decays(laid_out)
            state.optimizer.step(self._detached, laid_out, lr)
        state.step += 1
        return nll.detach()

    @cached_property
    def _forward(self) -> Forward:
        return lane_forward(self.module, self.strategy, self.state.parameters, self.state.buffers)

    def compile(self) -> str:
        """Switches the forward pass to `torch.compile`. Returns "", or the reason why not (then nothing changes)."""
        if self.strategy != "single" or self._noise is not None:
            return "it supports single networks without noise only"
        state = self.state
        compiled = lane_forward(self.module, "single", state.parameters, state.buffers, torch.compile(self.module))
        saved = {name: b.clone() for name, b in state.buffers.items()}
        begin, end = self.bounds[0]
        x, y = self.data.gather(self._epoch(0)[0][:, begin:end])
        plain, self._forward = self._forward, compiled
        try:
            with self.training_mode():
                nll = self._nll(self._outputs(x, {}), y, state.log_noise).sum()
                torch.autograd.grad(nll, state.trained, materialize_grads=True)
        except Exception as error:  # the compiler and the tools it calls raise errors of any kind
            self._forward = plain
            return " ".join(f"{type(error).__name__}: {error}".split())[:300]
        finally:
            for name, b in state.buffers.items():
                b.copy_(saved[name])
        return ""

    def _penalty(self) -> Tensor | None:
        """The noise transform's own term of the objective times N, [L]."""
        if self.config.noise_transform is None:
            return None
        leaves = self.state.parameters
        if self.strategy == "single":
            leaves = {n: p.unsqueeze(0) for n, p in self.module.named_parameters()}
        assert self._noise is not None
        return self.config.noise_transform.penalty(leaves, self._base_prior, self._noise.widths)

    def _add_decays(self, grads: Sequence[Tensor]) -> None:
        """Adds, in place, the gradient of the noise transform's quadratic terms."""
        if self.config.noise_transform is None:
            return
        decays = self.config.noise_transform.decays(self.state.parameters, self._base_prior)
        for name, grad, p in zip(self.state.parameters, grads, self._detached, strict=False):
            if name in decays:
                grad.addcmul_(p, decays[name].reshape(-1, *[1] * (p.dim() - 1)), value=1 / self.num_points)

    @property
    def _given_noise(self) -> Tensor | None:
        """Log σ [L, K] where it is given by likelihood.sigma: then it may be the cause of a divergence."""
        return self.state.log_noise if self.config.noise.noise == "fixed" else None

    @torch.no_grad()
    def _record_epoch(self, epoch: int, lr: float) -> None:
        state, lanes = self.state, len(self.lanes)
        nll = (state.nll_sum / self.num_points).tolist()
        penalty = torch.zeros(lanes, device=self.device)
        for name, p in state.parameters.items():
            penalty += self.prior[name] / (2 * self.num_points) * p.square().reshape(lanes, -1).sum(-1)
        if (noise_penalty := self._penalty()) is not None:
            penalty += noise_penalty / self.num_points
        noise = None if state.log_noise is None else state.log_noise.exp().mean(-1).tolist()
        for i, value in enumerate(penalty.tolist()):
            row = {"epoch": epoch + 1, "seconds": state.seconds, "loss": nll[i] + value, "nll": nll[i], "lr": lr}
            if noise is not None:
                row["noise"] = noise[i]
            state.history[i].append(row)
        state.nll_sum.zero_()

    def _tune(self, epoch: int) -> None:
        """Lets the training rule, if there is one, change the prior after `epoch` epochs."""
        rule, tuning, schedule = self.config.rule, self.state.tuning, self.config.schedule
        if rule is None or tuning is None or not rule.due(schedule, epoch):
            return
        lane = self.lanes[0]
        rule.update(self.network(0), lane.task, tuning, epoch, lane.seed)
        self._apply_precisions()
        self.state.history[0][-1]["evidence_nats"] = tuning.trace[-1]["evidence_nats"]
        if rule.restarts(schedule, epoch):
            for moment in self.state.optimizer.state:
                moment.zero_()

    def _apply_precisions(self) -> None:
        """Continues with the precisions that the training rule has selected."""
        if self.state.tuning is not None:
            self.prior = dict(self.state.tuning.precisions)
            decays = [self.prior[name] / self.num_points for name in self.state.parameters]
            self.state.optimizer.decay([*decays, *[0.0] * (len(self.state.trained) - len(decays))])

    @torch.no_grad()
    def _restore_best(self) -> None:
        """Restores the weights and precisions that the training rule has saved as the best, if any."""
        state = self.state
        if state.tuning is None or not (best := state.tuning.best):
            return
        for saved, current in ((best["parameters"], state.parameters), (best["buffers"], state.buffers)):
            for name, t in current.items():
                t[0].copy_(saved[name])
        if state.log_noise is not None and best["log_noise"] is not None:
            state.log_noise[0].copy_(best["log_noise"])
        state.tuning.precisions = dict(best["precisions"])
        self._apply_precisions()

    def network(self, i: int) -> Network:
        """Returns a copy of lane i in its current state."""
        state, lane = self.state, self.lanes[i]
        parameters = {
            n: p[i].detach().clone(memory_format=torch.contiguous_format) for n, p in state.parameters.items()
        }
        buffers = {n: b[i].clone() for n, b in state.buffers.items()}
        log_noise = None if state.log_noise is None else state.log_noise[i].detach().clone()
        if log_noise is not None and self.config.noise.noise == "residual":
            log_noise = residual_log_noise(self.module, parameters | buffers, lane.task)
        return Network(
            module=self.module,
            parameters=parameters,
            buffers=buffers,
            likelihood=self.config.noise.likelihood(lane.task.spec.kind, log_noise),
            prior_precision=dict(self.prior),
            key=lane.key,
            history=tuple(state.history[i]),
            seconds=state.seconds / len(self.lanes),
            tuning=() if state.tuning is None else tuple(state.tuning.trace),
        )
