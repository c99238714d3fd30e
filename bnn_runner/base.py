"""The contracts everything stands on. The rest of the program imports this module and little else.

Letters: N data points in a split, B points in a batch, K network outputs, P trainable parameters,
S posterior draws, L lanes (independent networks trained at once), tau points in a joint block.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Protocol, runtime_checkable

import torch
from torch import Tensor, nn

if TYPE_CHECKING:
    from bnn_runner.hyper import HyperRule
    from bnn_runner.rework import Rework
    from bnn_runner.schedules import Schedule

Kind = Literal["regression", "classification"]


# --------------------------------------------------------------------------------------- data


@dataclass(frozen=True)
class TaskSpec:
    """What a data set is, known without reading it: enough to check a model or a method against it.

    `input_shape` is without the batch axis ((1, 28, 28) for an image, (6,) for a table row).
    `vocabulary` above 0 says that inputs are token ids [T] (int64, from 0 to vocabulary - 1, padded
    at the end with 0); only models that say `takes_tokens = True` take them.
    """

    name: str
    kind: Kind
    input_shape: tuple[int, ...]
    num_outputs: int
    val_fraction: float
    vocabulary: int = 0


@runtime_checkable
class LazyInputs(Protocol):
    """Inputs [N, ...] that are read or made batch by batch and are never all in memory."""

    @property
    def device(self) -> torch.device:
        """Where batches come to lie."""
        ...

    def __len__(self) -> int: ...

    def read(self, indices: Tensor) -> Tensor:
        """The points at `indices` [B], in that order, [B, ...]: the same whatever else is in the batch."""
        ...

    def ahead(self, indices: Tensor) -> None:
        """A hint that these points are read next."""
        ...

    def at(self, indices: Tensor) -> LazyInputs:
        """The points at `indices` [M] as inputs of their own; nothing is read."""
        ...

    def joined(self, others: Sequence[LazyInputs]) -> LazyInputs:
        """These points and then those of `others`, which are of the same kind."""
        ...

    def to(self, device: torch.device) -> LazyInputs: ...


@dataclass(frozen=True)
class Split:
    """Some points of a data set, in memory (on whichever device) or read as they are asked for, in a fixed order.

    `inputs` [N, ...] are kept as stored (uint8 for images); `prepare` makes network inputs of a
    gathered batch, on its device. `targets` are [N] int64 class labels or [N, K] standardised
    floats; a split without labels (out of distribution) has none. `ids` [N] name each point by its
    place in the published data set.
    """

    inputs: Tensor | LazyInputs
    targets: Tensor | None
    ids: Tensor
    prepare: Callable[[Tensor], Tensor] = lambda x: x

    def __len__(self) -> int:
        return len(self.ids)

    def gather(self, indices: Tensor) -> tuple[Tensor, Tensor | None]:
        """Inputs [..., *input_shape] and targets of `indices` (any shape: [B] or [L, B])."""
        flat = indices.reshape(-1).to(self.inputs.device)
        stored = self.inputs
        # index_select: on a CPU many times faster than [flat] for bytes
        x = self.prepare(stored.index_select(0, flat) if isinstance(stored, Tensor) else stored.read(flat))
        x = x.reshape(*indices.shape, *x.shape[1:])
        if self.targets is None:
            return x, None
        y = self.targets.index_select(0, flat)
        return x, y.reshape(*indices.shape, *y.shape[1:])

    def batches(self, batch_size: int) -> Iterator[tuple[Tensor, Tensor | None]]:
        """Batches in order; every point once, none dropped."""
        for start in range(0, len(self), batch_size):
            middle = min(start + batch_size, len(self))
            self.ahead(torch.arange(middle, min(middle + batch_size, len(self))))
            yield self.gather(torch.arange(start, middle, device=self.inputs.device))

    def ahead(self, indices: Tensor) -> None:
        """A hint that the points at `indices` (any shape) are gathered next, for inputs that are read from files."""
        if not isinstance(self.inputs, Tensor) and indices.numel():
            self.inputs.ahead(indices.reshape(-1))

    def subset(self, indices: Tensor) -> Split:
        """The points at `indices` [M], in that order."""
        indices = indices.to(self.inputs.device)
        targets = None if self.targets is None else self.targets[indices]
        inputs = self.inputs[indices] if isinstance(self.inputs, Tensor) else self.inputs.at(indices)
        return replace(self, inputs=inputs, targets=targets, ids=self.ids[indices.to(self.ids.device)])

    def to(self, device: torch.device, dtype: torch.dtype) -> Split:
        """On `device`, floating-point numbers as `dtype`, also those that `prepare` makes; integers stay integers."""
        inputs = self.inputs.to(device)
        if isinstance(inputs, Tensor) and inputs.is_floating_point():
            inputs = inputs.to(dtype)
        targets = self.targets
        if targets is not None:
            targets = targets.to(device, dtype if targets.is_floating_point() else None)
        raw = self.prepare

        def prepare(x: Tensor) -> Tensor:
            made = raw(x)
            return made.to(dtype) if made.is_floating_point() else made

        return replace(self, inputs=inputs, targets=targets, prepare=prepare)


@dataclass(frozen=True)
class Task:
    """What a data set gives to a run.

    Regression targets are standardised on the training part: y_original = target_mean +
    target_scale * y, both [K] (zeros and ones for classes). `truth` maps original-unit inputs
    [M, D] to noise-free outputs [M, K] where the data are made, `true_noise` to the noise's standard
    deviation [M, K]. `fingerprint` is a hash of the content that a training depends on.
    `unavailable` says why an out-of-distribution set is absent. `shifted` are the test points under a
    growing shift, with their targets: "<name>/<level>", and "clean/0" without any.

    What predictions for new points need: `encode` makes inputs as the splits store them of original
    ones [M, ...] (a table's float64 columns in original units, an image set's uint8 pixels [M, C, H, W]).
    `feature_names` name the columns that a table of new points must have, in the order that `encode`
    takes; `feature_categories` lists the texts of a column of texts, where `encode` takes each text's
    place in that list; NaN stands for a missing cell. `read_image` reads an image file as an original
    input where the set does more than take its pixels (resizing). `target_names` [K] name regression targets.
    """

    spec: TaskSpec
    train: Split
    val: Split
    test: Split
    ood: Mapping[str, Split]
    fingerprint: str
    target_mean: Tensor
    target_scale: Tensor
    input_mean: Tensor | None = None
    input_scale: Tensor | None = None
    truth: Callable[[Tensor], Tensor] | None = None
    true_noise: Callable[[Tensor], Tensor] | None = None
    unavailable: Mapping[str, str] = field(default_factory=dict)
    shifted: Mapping[str, Split] = field(default_factory=dict)
    class_names: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    feature_names: tuple[str, ...] = ()
    feature_categories: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    target_names: tuple[str, ...] = ()
    encode: Callable[[Tensor], Tensor] | None = None
    read_image: Callable[[Path], Tensor] | None = None

    def new_points(self, original: Tensor) -> Split:
        """Points without targets from original inputs [M, ...], prepared as those of this task are.

        Raises what `encode` raises (`UserError` for a cell that it cannot take).
        """
        stored = original if self.encode is None else self.encode(original)
        like = self.target_mean
        inputs = stored.to(like.device, like.dtype if stored.is_floating_point() else None)
        return Split(inputs, None, torch.arange(len(inputs)), self.test.prepare)

    def splits(self) -> dict[str, Split]:
        """Every split by name: train, val, test, ood/<name>."""
        named = {"train": self.train, "val": self.val, "test": self.test}
        return named | {f"ood/{name}": split for name, split in self.ood.items()}

    def to(self, device: torch.device, dtype: torch.dtype) -> Task:
        """The same task with its tensors on `device` in `dtype`."""
        return replace(
            self,
            train=self.train.to(device, dtype),
            val=self.val.to(device, dtype),
            test=self.test.to(device, dtype),
            ood={name: split.to(device, dtype) for name, split in self.ood.items()},
            shifted={name: split.to(device, dtype) for name, split in self.shifted.items()},
            target_mean=self.target_mean.to(device, dtype),
            target_scale=self.target_scale.to(device, dtype),
        )


@runtime_checkable
class DataSet(Protocol):
    """A frozen dataclass whose fields are its YAML's keys (without `recommended`)."""

    val_fraction: float

    def spec(self) -> TaskSpec:
        """What is known before any file is opened. Raises `UserError` for values that cannot be."""
        ...

    def load(self, data_dir: Path, seed: int) -> Task:
        """Read or make the data. Same arguments, same task. Reading never writes beside the data."""
        ...


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
    """

    module: nn.Module
    parameters: dict[str, Tensor]
    buffers: dict[str, Tensor]
    likelihood: Likelihood
    prior_precision: dict[str, float]
    key: str = ""
    history: tuple[Mapping[str, float], ...] = ()
    seconds: float = 0.0

    @property
    def tensors(self) -> dict[str, Tensor]:
        """Parameters and buffers together, as `functional_call` wants them."""
        return {**self.parameters, **self.buffers}

    @property
    def num_parameters(self) -> int:
        return sum(p.numel() for p in self.parameters.values())

    def __call__(self, x: Tensor) -> Tensor:
        """Outputs [B, K] at the trained weights, in evaluation mode, which is left as found."""
        from bnn_runner.modes import evaluation_mode

        with evaluation_mode(self.module):
            return torch.func.functional_call(self.module, self.tensors, (x,))


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
    rework: Rework | None = None

    @property
    def identity(self) -> tuple[tuple[str, Any], ...]:
        """What the spec adds to the cache key, beside the member."""
        return self.extras if self.rework is None else (*self.extras, ("rework", repr(self.rework)))


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
class Moments:
    """Closed-form mean [B, K] and covariance [B, K, K] of the network outputs at B points."""

    mean: Tensor
    covariance: Tensor


class Posterior(Protocol):
    """What a method fits; immutable. As a frozen dataclass of plain parts it can be saved (see `posterior_store`).

    `finite` says that the draws are the whole posterior (MAP, ensembles): their joint scores are
    exact. `report` is one flat mapping of facts for the row (evidence, chosen precision, repairs);
    `treatment` says, for every trainable parameter tensor, by which rule it was treated.
    """

    @property
    def finite(self) -> bool: ...

    @property
    def likelihood(self) -> Likelihood: ...

    @property
    def report(self) -> Mapping[str, Any]: ...

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


@dataclass(frozen=True)
class FitContext:
    """What a method may use beside the task and the networks.

    `schedule` is that of training, for methods that go on with it or have one of the same kind.
    `progress(stage, done, total)` tells how far the fit is, and raises `Interrupted` when the run is
    to stop. A long fit keeps its state in the file `checkpoint` (written whole, at intervals and on
    `Interrupted`), and goes on from it when the run is started again; the runner removes it at the end.
    """

    seed: int
    hyper: HyperRule | None
    schedule: Schedule
    checkpoint: Path | None = None
    progress: Callable[[str, int, int], None] = lambda stage, done, total: None


Predictive = Literal["draws", "closed_form", "bridge"]


@runtime_checkable
class Settles(Protocol):
    """A method that decides something from the size of the task (`auto`)."""

    def settled(self, task: Task, network: Network) -> Method:
        """Itself, decided as for the whole task: what a cost estimate runs on a few points."""
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
