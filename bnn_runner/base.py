"""The contracts of models, methods and posteriors; `tasks` has those of data, `scoring` those of scores.

Letters: N data points in a split, B points in a batch, K network outputs, P trainable parameters,
S posterior draws, L lanes (independent networks trained at once), tau points in a joint block.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Protocol, runtime_checkable

import torch
from torch import Tensor, nn

from bnn_runner.tasks import Split, Task, TaskSpec

if TYPE_CHECKING:
    from bnn_runner.training.schedules import Schedule

# ------------------------------------------------------------------------------------- models


class Likelihood(Protocol):
    """p(y | outputs), in the network's own (standardised) target units."""

    def log_prob(self, outputs: Tensor, y: Tensor) -> Tensor:
        """Log p(y_b | outputs[..., b, :]) in nats, [..., B]."""
        ...

    def curvature_root(self, outputs: Tensor) -> Tensor:
        """R [B, K, C] with R Rᵀ the Fisher information of the outputs, which is free of y.

        It equals −∂² log p / ∂outputs² for classes and homoscedastic regression, and its mean over y always.
        """
        ...


@runtime_checkable
class Model(Protocol):
    """A frozen dataclass whose fields are its YAML's keys."""

    def problems(self, spec: TaskSpec) -> list[str]:
        """Why this network cannot serve that task (empty when it can); no torch work."""
        ...

    def build(self, spec: TaskSpec) -> nn.Module:
        """A new network; its initial weights come from the global RNG, which the caller has seeded.

        A network whose forward pass also takes parameters stacked on a leading lane axis, with
        inputs [L, B, ...], says so by a class attribute `stacks_lanes = True`.
        """
        ...


def model_problems(model: Model, spec: TaskSpec) -> list[str]:
    """Why `model` cannot serve that task: token ids for a network of numbers, else what the model says itself.

    A model of token ids says so by a class attribute `takes_tokens = True`, and refuses by its own
    `problems` a task whose `vocabulary` is 0.
    """
    if spec.vocabulary and not getattr(model, "takes_tokens", False):
        return [
            f"{type(model).__name__} cannot take the inputs of data={spec.name}, which are token ids and no numbers. "
            "Choose a network for text with model=..., or another data set."
        ]
    return model.problems(spec)


@dataclass(frozen=True)
class Network:
    """A trained network: a module for its shape, and plain tensors for its weights.

    The module is never called with weights of its own; use `functional_call(module, tensors, x)`.
    `log_noise` [K] is the log standard deviation of regression noise in standardised units.
    `prior_precision` maps each parameter name to the precision of the training prior (a scalar).
    `tuning` has one row for each time that a hyperparameter rule changed these on the way.
    """

    module: nn.Module
    parameters: dict[str, Tensor]
    buffers: dict[str, Tensor]
    likelihood: Likelihood
    prior_precision: dict[str, float]
    key: str = ""
    history: tuple[Mapping[str, float], ...] = ()
    seconds: float = 0.0
    tuning: tuple[Mapping[str, Any], ...] = ()

    @property
    def tensors(self) -> dict[str, Tensor]:
        """Parameters and buffers together, as `functional_call` wants them."""
        return {**self.parameters, **self.buffers}

    @property
    def num_parameters(self) -> int:
        return sum(p.numel() for p in self.parameters.values())

    def __call__(self, x: Tensor) -> Tensor:
        """Outputs [B, K] at the trained weights, in evaluation mode, which is left as found."""
        from bnn_runner.runtime.torch_state import evaluation_mode

        with evaluation_mode(self.module):
            return torch.func.functional_call(self.module, self.tensors, (x,))


# ------------------------------------------------------------------------------------ training


@runtime_checkable
class Augmentation(Protocol):
    """A frozen dataclass whose fields are its YAML's keys."""

    def problems(self, spec: TaskSpec) -> list[str]:
        """Why it cannot serve that task (empty when it can)."""
        ...

    def choose(self, points: int, image: tuple[int, ...], generator: torch.Generator) -> Tensor:
        """What happens to each of `points` images of shape (C, H, W): integers [points, F], on the CPU."""
        ...

    def __call__(self, x: Tensor, chosen: Tensor) -> Tensor:
        """Images [B, C, H, W] as `chosen` [B, F] has them, in the same shape."""
        ...


class NoiseTransform(Protocol):
    """A frozen dataclass; its fields join the cache key of the networks trained with it."""

    def apply(self, module: nn.Module) -> None:
        """Change a newly built network in place (`insert_noise`); names of its parameters stay as they are."""
        ...

    def precisions(self, module: nn.Module, prior: Mapping[str, float]) -> dict[str, float]:
        """The training prior's precision of every parameter of the reworked network, from that of the prior as given.

        0 where `penalty` has the word.
        """
        ...

    def sample(self, rows: int, widths: Sequence[int], random: torch.Generator) -> Tensor:
        """Noise [rows, ΣF] in float32, the columns of every layer one after the other."""
        ...

    def penalty(self, parameters: Mapping[str, Tensor], prior: Mapping[str, float]) -> Tensor | None:
        """What is added to N times the objective, in nats, [L]; None for nothing.

        Differentiable in every tensor except those that `decays` names.
        """
        ...

    def decays(self, parameters: Mapping[str, Tensor], prior: Mapping[str, float]) -> Mapping[str, Tensor]:
        """Factors c [L] of the tensors w in which the penalty is ½ c |w|²: its gradient c w comes without autograd."""
        ...


@dataclass(frozen=True)
class TrainingSpec:
    """One trained network a method needs: which member (0 is the MAP network), and extra settings.

    `extras` are method settings that shape training (a dropout rate); they join the cache key.
    `trained=False` asks for the network as it starts, with its initial weights: for a method that
    samples or optimises by itself. It costs nothing and is not cached. `rework` changes the network
    before it is trained (dropout's noise); it joins the cache key too.
    """

    member: int = 0
    extras: tuple[tuple[str, Any], ...] = ()
    trained: bool = True
    noise_transform: NoiseTransform | None = None

    @property
    def identity(self) -> tuple[tuple[str, Any], ...]:
        """What the spec adds to the cache key, beside the member."""
        return self.extras if self.noise_transform is None else (*self.extras, ("rework", repr(self.noise_transform)))


# ---------------------------------------------------------------------------------- posteriors


class Draws(Protocol):
    """S frozen functions. `draws(x)` is [S, B, K] for x [B, ...], the same functions for every x.

    `draws[a:b]` are draws a to b of the same sequence: draw s depends on (seed, s) only.
    `floats_per_draw` is what one draw holds in memory while used, from which chunks are sized.
    `likelihood` broadcasts against [S, B, K]: each draw may have a noise of its own.
    """

    @property
    def log_weights(self) -> Tensor: ...

    @property
    def floats_per_draw(self) -> int: ...

    @property
    def likelihood(self) -> Likelihood: ...

    def __len__(self) -> int: ...

    def __getitem__(self, part: slice) -> Draws: ...

    def __call__(self, x: Tensor) -> Tensor: ...


@dataclass(frozen=True)
class FitReport:
    """What a fit reports of itself, for the row of its cell and for a reader.

    `facts` are numbers and words by name (evidence, selected precision), `notes` what a reader should know, `repairs`
    how often each numerical repair was made, and `cites` the BibTeX keys of what the fit used beyond
    what its method names (a curvature structure decided by the size of the task).
    """

    facts: Mapping[str, Any] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    repairs: Mapping[str, int] = field(default_factory=dict)
    cites: tuple[str, ...] = ()

    def extended(self, facts: Mapping[str, Any], notes: Sequence[str] = ()) -> FitReport:
        """The same report with further facts and notes."""
        return replace(self, facts={**self.facts, **facts}, notes=(*self.notes, *notes))

    def row(self) -> dict[str, Any]:
        """Everything under one level of keys, as cell.json keeps it."""
        return {**self.facts, "repairs": dict(self.repairs), "notes": list(self.notes)}


@dataclass(frozen=True)
class Moments:
    """Closed-form mean [B, K] and covariance [B, K, K] of the network outputs at B points."""

    mean: Tensor
    covariance: Tensor


class Posterior(Protocol):
    """What a method fits; immutable. As a frozen dataclass of plain parts it can be saved (see `posteriors.io`).

    `finite` says that the draws are the whole posterior (MAP, ensembles): their joint scores are exact.
    `treatment` names, for every trainable parameter tensor, the rule by which it was treated.
    """

    @property
    def finite(self) -> bool: ...

    @property
    def likelihood(self) -> Likelihood: ...

    @property
    def report(self) -> FitReport: ...

    @property
    def treatment(self) -> Mapping[str, str]: ...

    def draws(self, num_draws: int, seed: int) -> Draws:
        """`num_draws` functions (a finite posterior gives all of its own, whatever is asked)."""
        ...


@runtime_checkable
class ClosedForm(Protocol):
    """A posterior that also knows its output moments in closed form."""

    def moments(self, x: Tensor) -> Moments: ...

    def joint_covariance(self, split: Split) -> Tensor:
        """Covariance [N*K, N*K] of the outputs at all points of a split."""
        ...


@runtime_checkable
class Centred(Protocol):
    """A posterior over functions with a centre, say f(x, w*) of a linearised one."""

    def centre(self, x: Tensor) -> Tensor:
        """Outputs [B, K] of the centre."""
        ...


# ------------------------------------------------------------------- hyperparameter rules


@dataclass(frozen=True)
class PrecisionProblem:
    """Precisions are one a group of weights (a parameter tensor, mostly), [T] float64.

    `evidence` is in nats, of precisions [T] or of one for all, [1]; `validation` is the mean
    log-likelihood of the validation part for each of several precisions [T];
    `effective_dimensions` are Tr_g H (H + Λ)⁻¹, [T], and `squares` the squared norms ‖w_g‖² [T] of
    the weights that the evidence is taken at, which may depend on the precisions; `invariant` names the
    groups whose scale a normalisation layer takes out again. `diagonal` is H itself [P] where it is
    diagonal: then each weight may have a precision of its own, and all of the above also take
    precisions [P] (and give terms [P]); `sizes` are the numbers of weights of the groups.
    `dimension_samples`, where effective dimensions are means over posterior samples, are these, [S, T].
    Where the evidence is taken at a point that moves with the precisions (v* of the tangent model), `gap` is what
    it may still gain there, in nats (0 where that point is reached to its tolerance), and `exhausted` says that
    no pass over the data is left to search it at further precisions.
    """

    names: tuple[str, ...]
    start: Tensor
    evidence: Callable[[Tensor], Tensor]
    validation: Callable[[Sequence[Tensor]], list[float]]
    effective_dimensions: Callable[[Tensor], Tensor]
    squares: Callable[[Tensor], Tensor]
    invariant: tuple[str, ...] = ()
    diagonal: Tensor | None = None
    sizes: tuple[int, ...] = ()
    dimension_samples: Callable[[Tensor], Tensor] | None = None
    gap: Callable[[Tensor], float] = lambda precisions: 0.0
    exhausted: Callable[[], bool] = lambda: False


HyperStatus = Literal[
    "fixed", "chosen in training", "converged", "not converged", "v* not reached", "at bound", "diverged", "failed"
]
"""How a rule's search ended (see `hyper.search_end`).

Converged: the evidence's derivative in every log precision is below 0.01 nats. At bound: some precision ran away and
is held. Diverged and failed keep start values. v* not reached: the passes over the data were spent, or v* was not
found closely enough to tell. The notes name the precisions and say what to do.
"""


@dataclass(frozen=True)
class Choice:
    """The precisions that a rule selected, [T] or [P] (one a weight), and how its search ended.

    `facts` are further numbers for the row, `notes` what a reader should know.
    """

    precisions: Tensor
    status: HyperStatus
    facts: Mapping[str, Any] = field(default_factory=dict)
    notes: tuple[str, ...] = ()


class HyperRule(Protocol):
    """A frozen dataclass whose fields are its YAML's keys."""

    needs_validation: ClassVar[bool]

    def choose(self, problem: PrecisionProblem) -> Choice: ...


# ------------------------------------------------------------------------------------- methods


@dataclass(frozen=True)
class FitContext:
    """What a method may use beside the task and the networks.

    `schedule` and `augment` are those of training, for methods that go on with it.
    `progress(stage, done, total)` tells how far the fit is, and raises `Interrupted` when the run is
    to stop. A long fit keeps its state in the file `checkpoint` (written whole, at intervals and on
    `Interrupted`), and goes on from it when the run is started again; the runner removes it at the end.
    `noise_fixed`: the noise of regression is given (likelihood.noise=fixed), and no fit may move it.
    `record(row)` takes a line of the fit's own history, for history.csv.
    """

    seed: int
    hyper: HyperRule | None
    schedule: Schedule
    checkpoint: Path | None = None
    progress: Callable[[str, int, int], None] = lambda stage, done, total: None
    augment: Augmentation | None = None
    noise_fixed: bool = False
    record: Callable[[Mapping[str, float]], None] = lambda row: None


Predictive = Literal["draws", "closed_form", "bridge"]


@runtime_checkable
class DecidesBySize(Protocol):
    """A method that decides something by the size of the task (`auto`)."""

    def decided(self, task: Task, network: Network) -> Method:
        """The same method as it would decide for the whole task: what a cost estimate runs on a few points."""
        ...


@runtime_checkable
class Method(Protocol):
    """A frozen dataclass whose fields are its YAML's keys.

    `uses_hyper`: whether the hyper rule changes the result (if not, it is no part of the cell's id).
    `finite`: the draws are the whole posterior, so the number of draws asked for is no part of it either.
    `predictive`: how evaluation turns the posterior into probabilities.
    """

    uses_hyper: ClassVar[bool]
    finite: ClassVar[bool]

    @property
    def predictive(self) -> Predictive: ...

    def problems(self, spec: TaskSpec, hyper: HyperRule | None) -> list[str]:
        """Why this method cannot serve that task or rule (empty when it can)."""
        ...

    def needs(self) -> Sequence[TrainingSpec]:
        """Which trained networks, known before anything runs."""
        ...

    def fit(self, task: Task, networks: Sequence[Network], context: FitContext) -> Posterior:
        """The posterior, over the clean, unshuffled training set, no point dropped."""
        ...
