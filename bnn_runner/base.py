"""The contracts of models, methods and posteriors; `tasks` has those of data, `scoring` those of scores.

Letters: N data points in a split, B points in a batch, K network outputs, P trainable parameters,
S posterior draws, L lanes (independent networks trained at once on a leading axis), tau points in a joint block.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Protocol, runtime_checkable

import torch
from torch import Tensor, nn

from bnn_runner.runtime.console import Progress
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
        """R [B, K, C] with R Rᵀ the Fisher information of the outputs, which does not depend on y.

        It is the mean over y of −∂² log p / ∂outputs²; for classes and homoscedastic regression it is that Hessian.
        """
        ...


@runtime_checkable
class Model(Protocol):
    """A frozen dataclass whose fields are its YAML's keys."""

    def problems(self, spec: TaskSpec) -> list[str]:
        """Why this network does not support the task (empty when it does); builds nothing."""
        ...

    def build(self, spec: TaskSpec) -> nn.Module:
        """A new network; its initial weights come from the global RNG, which the caller has seeded.

        A network whose forward pass also takes parameters stacked on a leading lane axis, with
        inputs [L, B, ...], declares it by a class attribute `stacks_lanes = True`.
        """
        ...


def model_problems(model: Model, spec: TaskSpec) -> list[str]:
    """Why `model` does not support the task: token ids for a network of numbers, else what the model reports itself.

    A model of token ids declares it by a class attribute `takes_tokens = True`, and refuses in its own
    `problems` a task whose `vocabulary` is 0.
    """
    if spec.vocabulary and not getattr(model, "takes_tokens", False):
        return [
            f"{type(model).__name__} does not support data={spec.name}, whose inputs are token ids. Choose a model for "
            "text with model=..., or another data set."
        ]
    return model.problems(spec)


@dataclass(frozen=True)
class Network:
    """A trained network: a module for its shape, and plain tensors for its weights.

    Never call the module with its own weights; use `functional_call(module, tensors, x)`.

    Attributes:
        module: the architecture.
        parameters: trained tensors, by name.
        buffers: other tensors (running statistics), by name.
        likelihood: with the trained noise in regression.
        prior_precision: of the training prior, by parameter name.
        key: of the network cache; "" for a network outside it.
        history: one row per epoch.
        seconds: that the training took.
        tuning: one row for each time that a hyperparameter rule changed the prior during training.
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
        """Parameters and buffers together, as `functional_call` takes them."""
        return {**self.parameters, **self.buffers}

    @property
    def num_parameters(self) -> int:
        return sum(p.numel() for p in self.parameters.values())

    def __call__(self, x: Tensor) -> Tensor:
        """Outputs [B, K] at the trained weights, in evaluation mode; the module's own mode is restored."""
        from bnn_runner.runtime.torch_state import evaluation_mode

        with evaluation_mode(self.module):
            return torch.func.functional_call(self.module, self.tensors, (x,))


# ------------------------------------------------------------------------------------ training


@runtime_checkable
class Augmentation(Protocol):
    """A frozen dataclass whose fields are its YAML's keys."""

    def problems(self, spec: TaskSpec) -> list[str]:
        """Why it does not support the task (empty when it does)."""
        ...

    def choose(self, points: int, image: tuple[int, ...], generator: torch.Generator) -> Tensor:
        """The random choices for each of `points` images of shape (C, H, W): integers [points, F], on the CPU."""
        ...

    def __call__(self, x: Tensor, chosen: Tensor) -> Tensor:
        """Images [B, C, H, W] changed by the choices `chosen` [B, F], in the same shape."""
        ...


class NoiseTransform(Protocol):
    """Noise in a network's layers; a frozen dataclass whose fields join the cache key of networks trained with it."""

    def apply(self, module: nn.Module) -> None:
        """Change a newly built network in place (`insert_noise`); the names of its parameters stay."""
        ...

    def precisions(self, module: nn.Module, prior: Mapping[str, float]) -> dict[str, float]:
        """The training prior's precision of every parameter of the network with noise layers.

        Args:
            module: the network with noise layers.
            prior: the prior's precisions without noise.

        Returns:
            Precisions by name; 0 where `penalty` covers the parameter.
        """
        ...

    def sample(self, rows: int, widths: Sequence[int], random: torch.Generator) -> Tensor:
        """Noise [rows, ΣF] in float32, the columns of one layer after those of the other."""
        ...

    def penalty(
        self, parameters: Mapping[str, Tensor], prior: Mapping[str, float], widths: Mapping[str, int]
    ) -> Tensor | None:
        """What is added to N times the objective, in nats, [L]; None for nothing.

        `widths` maps noise buffers to their numbers of features F. It is differentiable in every tensor except those
        that `decays` names.
        """
        ...

    def decays(self, parameters: Mapping[str, Tensor], prior: Mapping[str, float]) -> Mapping[str, Tensor]:
        """Factors c [L] of tensors w in which the penalty is ½ c |w|²; its gradient c w is added without autograd."""
        ...


@dataclass(frozen=True)
class TrainingSpec:
    """One network that a method needs.

    Attributes:
        member: which ensemble member; 0 is the MAP network.
        extras: method settings that shape the training; they join the cache key.
        trained: False requests the initial weights, for a method that samples or optimises by itself. That costs
            nothing and is not cached.
        noise_transform: changes the network before it is trained (dropout); it joins the cache key too.
    """

    member: int = 0
    extras: tuple[tuple[str, Any], ...] = ()
    trained: bool = True
    noise_transform: NoiseTransform | None = None

    @property
    def identity(self) -> tuple[tuple[str, Any], ...]:
        """What the spec adds to the cache key, in addition to the member."""
        return self.extras if self.noise_transform is None else (*self.extras, ("rework", repr(self.noise_transform)))


# ---------------------------------------------------------------------------------- posteriors


class Draws(Protocol):
    """S frozen functions: `draws(x)` is [S, B, K] for x [B, ...], with the same functions for every x.

    `draws[a:b]` are draws a to b of the same sequence: draw s depends on (seed, s) only.
    `floats_per_draw` is the memory that one draw takes while in use; chunks are sized by it.
    `likelihood` broadcasts against [S, B, K]: each draw may have its own noise.
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
    """What a fit reports, for the row of its cell and for a reader.

    Attributes:
        facts: numbers and words by name (evidence, selected precision).
        notes: what a reader should know.
        repairs: how often each numerical repair was made.
        cites: BibTeX keys of what the fit used beyond what its method names (a curvature structure, say).
    """

    facts: Mapping[str, Any] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    repairs: Mapping[str, int] = field(default_factory=dict)
    cites: tuple[str, ...] = ()

    def extended(self, facts: Mapping[str, Any], notes: Sequence[str] = ()) -> FitReport:
        """The same report with further facts and notes."""
        return replace(self, facts={**self.facts, **facts}, notes=(*self.notes, *notes))

    def row(self) -> dict[str, Any]:
        """Everything in one flat mapping, as cell.json keeps it."""
        return {**self.facts, "repairs": dict(self.repairs), "notes": list(self.notes)}


@dataclass(frozen=True)
class Moments:
    """Closed-form mean [B, K] and covariance [B, K, K] of the network outputs at B points."""

    mean: Tensor
    covariance: Tensor


class Posterior(Protocol):
    """What a method fits; immutable. A frozen dataclass of plain parts can be saved (see `posteriors.io`).

    `finite` means that the draws are the whole posterior (MAP, ensembles), so that joint scores are exact.
    `treatment` names, for every trainable parameter tensor, how it was treated.
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
        """`num_draws` functions; a finite posterior returns all of its own whatever `num_draws` is."""
        ...


@runtime_checkable
class ClosedForm(Protocol):
    """A posterior whose output moments have a closed form."""

    def moments(self, x: Tensor) -> Moments: ...

    def joint_covariance(self, split: Split) -> Tensor:
        """Covariance [N*K, N*K] of the outputs at all points of a split."""
        ...


class Centred(Protocol):
    """A posterior around one network, its centre, which is scored too: the posterior should be no worse.

    The centre is the trained network w* for every Laplace posterior and for an ensemble (member 0), the network without
    noise for dropout, the network at the mean weights for Bayes by Backprop and SWAG (of several members the first).
    Chains have none. It has the posterior's own `likelihood`. A class whose instances do not all have one makes
    `centre` a property that may be None (see `centre_of`).
    """

    def centre(self, x: Tensor) -> Tensor:
        """Outputs [B, K] of the centre."""
        ...


def centre_of(posterior: Posterior) -> Callable[[Tensor], Tensor] | None:
    """The function x [B, ...] -> outputs [B, K] of the posterior's centre; None where it has no centre."""
    centre: Callable[[Tensor], Tensor] | None = getattr(posterior, "centre", None)
    return centre


# ------------------------------------------------------------------- hyperparameter rules

ValidationScore = Literal["marginal", "dyadic", "joint"]
"""marginal: of one point; dyadic: of 10 labels over 2 points; joint: of 10 points."""


class ValidationScores(Protocol):
    """Log-likelihoods of the validation part for each of several precisions [T]."""

    def __call__(
        self, candidates: Sequence[Tensor], scores: Sequence[ValidationScore], points: int | None
    ) -> list[dict[ValidationScore, Tensor]]:
        """By score, for each candidate, in nats: marginal [1, V] of V points; dyadic and joint [R, M] of M blocks.

        NaN where a candidate has none. At most `points` points are scored (None: all), the same in every call.
        """
        ...


@dataclass(frozen=True)
class PrecisionProblem:
    """What a hyperparameter rule chooses by. Precisions are one per group of weights (mostly a tensor), [T] float64.

    Attributes:
        names: of the T groups.
        start: the training prior's precisions, [T].
        evidence: in nats, of precisions [T], or [1] for one precision for all; differentiable.
        validation: log-likelihoods of the validation part for each of several precisions [T].
        effective_dimensions: Tr_g H (H + Λ)⁻¹, [T].
        squares: squared norms ‖w_g‖² [T] of the weights that the evidence is taken at; they may depend on the
            precisions.
        invariant: the groups whose scale a normalisation layer removes.
        diagonal: H itself [P] where it is diagonal. Then each weight may have its own precision, and all of the
            above also take precisions [P] (and return terms [P]).
        sizes: numbers of weights of the groups.
        dimension_samples: where effective dimensions are means over posterior samples, these samples, [S, T].
        gap: where the evidence is taken at a point that moves with the precisions (v* of the tangent model), what it
            may still gain there, in nats; 0 where that point is reached to its tolerance.
        exhausted: whether no pass over the data is left to search that point at further precisions.
        validation_points: number of points of the validation part.
    """

    names: tuple[str, ...]
    start: Tensor
    evidence: Callable[[Tensor], Tensor]
    validation: ValidationScores
    effective_dimensions: Callable[[Tensor], Tensor]
    squares: Callable[[Tensor], Tensor]
    invariant: tuple[str, ...] = ()
    diagonal: Tensor | None = None
    sizes: tuple[int, ...] = ()
    dimension_samples: Callable[[Tensor], Tensor] | None = None
    gap: Callable[[Tensor], float] = lambda precisions: 0.0
    exhausted: Callable[[], bool] = lambda: False
    validation_points: int = 0


HyperStatus = Literal[
    "fixed", "chosen in training", "converged", "not converged", "v* not reached", "at bound", "diverged", "failed"
]
"""How a rule's search ended (see `hyper.search_end`).

converged: the evidence's derivative in every log precision is below 0.01 nats. at bound: some precision ran away and
is held. diverged, failed: start values are kept. v* not reached: the passes over the data ran out, or v* was not
found closely enough to decide. Notes name the precisions and say what to do.
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
    """A frozen dataclass whose fields are its YAML's keys.

    A rule that does not support every task has a method `problems(spec) -> list[str]` that says why. One that chooses
    without the evidence declares it by `uses_evidence: ClassVar[bool] = False`; it then costs no search of v*.
    """

    needs_validation: ClassVar[bool]

    def choose(self, problem: PrecisionProblem) -> Choice: ...


def uses_evidence(rule: HyperRule) -> bool:
    """Whether a rule chooses by the evidence."""
    return bool(getattr(rule, "uses_evidence", True))


# ------------------------------------------------------------------------------------- methods


@dataclass(frozen=True)
class FitContext:
    """What a method may use in addition to the task and the networks.

    Attributes:
        seed: of all randomness in the fit.
        hyper: the hyperparameter rule, where there is one.
        schedule: of training, for methods that continue it.
        checkpoint: the file in which a long fit keeps its state (written atomically, at intervals and on
            `Interrupted`), and from which it resumes; the runner removes it at the end.
        progress: called as progress(stage, done, total); it raises `Interrupted` when the run is to stop.
        augment: of training, for methods that continue it.
        noise_fixed: the noise of regression is given (likelihood.noise=fixed), and no fit may change it.
        record: takes one row of the fit's own history, for history.csv.
    """

    seed: int
    hyper: HyperRule | None
    schedule: Schedule
    checkpoint: Path | None = None
    progress: Progress = lambda stage, done, total: None
    augment: Augmentation | None = None
    noise_fixed: bool = False
    record: Callable[[Mapping[str, float]], None] = lambda row: None


Predictive = Literal["draws", "closed_form", "bridge"]


@runtime_checkable
class DecidesBySize(Protocol):
    """A method that decides something by the size of the task (a setting `auto`)."""

    def decided(self, task: Task, network: Network) -> Method:
        """The same method as it would decide for the whole task: what a cost estimate runs on a few points."""
        ...


@runtime_checkable
class TrainsFurther(Protocol):
    """A method whose fit trains or samples with mini-batches, in addition to the training of its networks."""

    def own_epochs(self, schedule: Schedule) -> int:
        """Passes of the fit over the training set, of one network or chain."""
        ...


@runtime_checkable
class Method(Protocol):
    """A frozen dataclass whose fields are its YAML's keys.

    Attributes:
        uses_hyper: whether the hyper rule changes the result; if not, it is not part of the cell's id.
        finite: the draws are the whole posterior, so that the number of draws is not part of the cell's id.
        predictive: how evaluation turns the posterior into probabilities.
    """

    uses_hyper: ClassVar[bool]
    finite: ClassVar[bool]

    @property
    def predictive(self) -> Predictive: ...

    def problems(self, spec: TaskSpec, hyper: HyperRule | None) -> list[str]:
        """Why this method does not support the task or the rule (empty when it does)."""
        ...

    def needs(self) -> Sequence[TrainingSpec]:
        """The networks that the method needs, known before anything runs."""
        ...

    def fit(self, task: Task, networks: Sequence[Network], context: FitContext) -> Posterior:
        """The posterior, fitted on the clean training set in order, no point dropped."""
        ...
