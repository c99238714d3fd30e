"""Inputs and state of a training: configuration, lanes, their stacked weights, and its checkpoint."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from bnn_runner.base import Augmentation, Model, NoiseTransform
from bnn_runner.hyper.training_rule import TrainingRule, TuningState
from bnn_runner.models.likelihoods import NoiseRule
from bnn_runner.models.priors import Prior
from bnn_runner.rng import global_stream
from bnn_runner.runtime.files import write_torch
from bnn_runner.runtime.torch_state import evaluation_mode
from bnn_runner.tasks import Task, TaskSpec
from bnn_runner.training.augmentation import Unchanged
from bnn_runner.training.lanes import Tensors
from bnn_runner.training.optimizers import Optimizer, make_optimizer
from bnn_runner.training.schedules import Schedule


@dataclass(frozen=True)
class Lane:
    """One network to train: its data, its seed (initial weights and data order derive from it) and its cache key."""

    task: Task
    seed: int
    key: str = ""


@dataclass(frozen=True)
class TrainingConfig:
    """Settings that all lanes of a group share."""

    model: Model
    schedule: Schedule
    prior: Prior
    noise: NoiseRule
    precision: str = "float32"
    dtype: torch.dtype = torch.float32
    stack: str = "auto"
    compile: bool = False
    noise_transform: NoiseTransform | None = None
    augment: Augmentation = field(default_factory=Unchanged)
    rule: TrainingRule | None = None

    def build(self, spec: TaskSpec) -> nn.Module:
        """Builds a new network, with noise layers if there is a transform; draws weights from the global RNG."""
        module = self.model.build(self.noise.network_spec(spec))
        if self.noise_transform is not None:
            self.noise_transform.apply(module)
        return module

    def precisions(self, module: nn.Module) -> dict[str, float]:
        """Returns the precision of each parameter under the training prior."""
        prior = self.prior.precisions(module)
        return prior if self.noise_transform is None else self.noise_transform.precisions(module, prior)


@dataclass
class State:
    """Everything that changes during training; a resumed training needs nothing else.

    Attributes:
        parameters: [L, ...] each.
        buffers: [L, ...] each.
        log_noise: log σ [L, K]; None if the likelihood has no noise of its own.
        trained: The tensors that autograd differentiates and the optimiser updates: the parameters (for a single lane
            without the lane axis, sharing memory), then log σ if it is learned.
        optimizer: Holds the moments.
        step: Number of updates so far.
        nll_sum: Sum of −log p over the points of the current epoch so far, [L].
        seconds: Training time so far.
        history: One list per lane, with one row per epoch.
        tuning: State of the hyperparameter rule, if it changes the prior during training.
    """

    parameters: Tensors
    buffers: Tensors
    log_noise: Tensor | None
    trained: list[Tensor]
    optimizer: Optimizer
    step: int = 0
    nll_sum: Tensor = field(default_factory=lambda: torch.zeros(0))
    seconds: float = 0.0
    history: list[list[dict[str, float]]] = field(default_factory=list)
    tuning: TuningState | None = None

    def payload(self) -> dict[str, Any]:
        """Returns everything as plain tensors and numbers, for `restore`."""
        return {
            "parameters": {k: v.detach() for k, v in self.parameters.items()},
            "buffers": self.buffers,
            "log_noise": None if self.log_noise is None else self.log_noise.detach(),
            "optimizer": self.optimizer.state,
            "step": self.step,
            "nll_sum": self.nll_sum,
            "seconds": self.seconds,
            "history": self.history,
            "tuning": None if self.tuning is None else self.tuning.payload(),
        }

    def save(self, path: Path) -> None:
        write_torch(path, self.payload())

    def load(self, path: Path, device: torch.device) -> bool:
        """Resumes from a checkpoint. Returns False, and changes nothing, if it is missing or damaged."""
        try:
            saved: dict[str, Any] = torch.load(path, map_location=device, weights_only=True)
            return self.restore(saved)
        except Exception:  # missing or unreadable: training starts from the beginning
            return False

    def restore(self, saved: Mapping[str, Any]) -> bool:
        """Resumes from a `payload`. Returns False, and changes nothing, if its shapes differ."""
        try:
            same = _shapes(saved["parameters"].values()) == _shapes(self.parameters.values())
            if not same or _shapes(saved["optimizer"]) != _shapes(self.optimizer.state):
                return False
        except (KeyError, AttributeError, TypeError):
            return False
        with torch.no_grad():
            for name, p in self.parameters.items():
                p.copy_(saved["parameters"][name])
            for name, b in self.buffers.items():
                b.copy_(saved["buffers"][name])
            if self.log_noise is not None:
                self.log_noise.copy_(saved["log_noise"])
            for current, stored in zip(self.optimizer.state, saved["optimizer"], strict=True):
                current.copy_(stored)
        self.step, self.nll_sum, self.seconds = saved["step"], saved["nll_sum"], saved["seconds"]
        self.history = saved["history"]
        if self.tuning is not None:
            self.tuning.restore(saved["tuning"])
        return True


def _shapes(tensors: Iterable[Tensor]) -> list[torch.Size]:
    return [t.shape for t in tensors]


def initial_state(config: TrainingConfig, lanes: Sequence[Lane], device: torch.device) -> tuple[nn.Module, State]:
    """Draws the initial weights of every lane and stacks them.

    The weights are drawn in float32 for every working dtype. For a single lane, the stacked tensors are views of the
    module's own tensors with a lane axis.

    Returns:
        The module of the first lane, and the state.
    """
    modules = []
    for lane in lanes:
        with global_stream(lane.seed, "init"):
            modules.append(config.build(lane.task.spec).to(device, config.dtype))
    module = modules[0]
    if len(lanes) == 1:
        if len(lanes[0].task.spec.input_shape) == 3:
            module = module.to(memory_format=torch.channels_last)
        leaves: list[Tensor] = list(module.parameters())
        parameters = {n: p.detach().unsqueeze(0) for n, p in module.named_parameters()}
        buffers = {n: b.unsqueeze(0) for n, b in module.named_buffers()}
    else:
        per_lane = [(dict(m.named_parameters()), dict(m.named_buffers())) for m in modules]
        parameters = {n: torch.stack([p[n].detach() for p, _ in per_lane]).requires_grad_() for n in per_lane[0][0]}
        buffers = {n: torch.stack([b[n] for _, b in per_lane]) for n in per_lane[0][1]}
        leaves = list(parameters.values())
    log_noise = _initial_noise(config, lanes, module, parameters, buffers)
    precisions, num_points = config.precisions(module), max(1, len(lanes[0].task.train))
    decays = [precisions[name] / num_points for name in parameters]
    trained = [*leaves]
    if log_noise is not None and log_noise.requires_grad:
        trained, decays = [*trained, log_noise], [*decays, 0.0]
    state = State(parameters, buffers, log_noise, trained, make_optimizer(config.schedule, trained, decays))
    if config.rule is not None:
        state.tuning = TuningState(config.precisions(module))
    state.nll_sum = torch.zeros(
        len(lanes), device=device, dtype=torch.float64 if device.type == "cpu" else torch.float32
    )
    state.history = [[] for _ in lanes]
    return module, state


@torch.no_grad()
def _initial_noise(
    config: TrainingConfig, lanes: Sequence[Lane], module: nn.Module, parameters: Tensors, buffers: Tensors
) -> Tensor | None:
    """Initial log σ [L, K] in standardised units; it requires a gradient if it is learned.

    None if the likelihood has no noise of its own (classification, heteroscedastic forms).
    """
    task = lanes[0].task
    if task.spec.kind == "classification" or config.noise.form != "homoscedastic":
        return None
    device = next(iter(parameters.values())).device
    if config.noise.noise == "fixed":
        rows = [config.noise.fixed_log_noise(lane.task.target_scale) for lane in lanes]
        return torch.stack(rows).to(device, config.dtype)
    if config.noise.noise == "residual":
        return torch.zeros(len(lanes), task.spec.num_outputs, device=device, dtype=config.dtype)
    rows = []
    for i, lane in enumerate(lanes):
        tensors = {n: t[i].detach() for n, t in (parameters | buffers).items()}
        rows.append(residual_log_noise(module, tensors, lane.task))
    return torch.stack(rows).requires_grad_()


@torch.no_grad()
def residual_log_noise(module: nn.Module, tensors: Tensors, task: Task) -> Tensor:
    """Returns ½ log of the mean squared training residual, [K], in standardised units; at least log 1e-6."""
    total, count = torch.zeros(task.spec.num_outputs, dtype=torch.float64), 0
    with evaluation_mode(module):
        for x, y in task.train.batches(1024):
            outputs = torch.func.functional_call(module, tensors, (x,))
            assert y is not None
            total += (y - outputs).square().sum(0).cpu().double()
            count += len(x)
    sample = next(iter(tensors.values()))
    return (0.5 * torch.log((total / count).clamp_min(1e-12))).to(sample.device, sample.dtype)
