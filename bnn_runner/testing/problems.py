"""Small tasks and untrained networks for contract checks: in float64, from no file, in milliseconds."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Literal

import torch
from torch import Tensor

from bnn_runner.base import FitContext, HyperRule, Model, Network, NoiseTransform, model_problems
from bnn_runner.hyper.fixed import Fixed
from bnn_runner.models.likelihoods import Categorical, Gaussian
from bnn_runner.rng import generator
from bnn_runner.tasks import Kind, Split, Task, TaskSpec
from bnn_runner.training.schedules import Schedule

KINDS: tuple[Kind, ...] = ("regression", "classification")
SHAPES: Mapping[tuple[int, ...], int] = {(3,): 0, (1, 16, 16): 0, (3, 8, 8): 0, (5,): 7}
"""Shapes of small inputs, with the size of the vocabulary if they are token ids."""


def make_task(
    kind: Literal["regression", "classification"] | str,
    shape: tuple[int, ...],
    num_outputs: int,
    num_train: int = 40,
    num_test: int = 12,
    seed: int = 0,
    vocabulary: int = 0,
) -> Task:
    """A task with random inputs; targets are skewed and scaled unequally, so that a swapped axis shows.

    Token ids of a `vocabulary` are padded with 0 from a random place on.
    """
    g = generator(seed, "test task")

    def split(n: int, first_id: int) -> Split:
        x = torch.randn(n, *shape, generator=g, dtype=torch.float64)
        flat = x.reshape(n, -1)
        if vocabulary:
            x = torch.randint(1, vocabulary, (n, *shape), generator=g)
            x[torch.arange(shape[0]) >= torch.randint(1, shape[0] + 1, (n, 1), generator=g)] = 0
        if kind == "classification":
            y: Tensor = torch.randint(0, num_outputs, (n,), generator=g)
        else:
            y = torch.stack([(k + 1) * torch.sin(flat[:, 0] + k) + flat[:, -1] ** 2 for k in range(num_outputs)], 1)
        return Split(x, y, torch.arange(first_id, first_id + n))

    scale = (
        torch.linspace(0.5, 2.0, num_outputs, dtype=torch.float64)
        if kind == "regression"
        else torch.ones(num_outputs, dtype=torch.float64)
    )
    return Task(
        spec=TaskSpec("random", kind, shape, num_outputs, 0.1, vocabulary),  # type: ignore[arg-type]
        train=split(num_train, 0),
        val=split(8, 1000),
        test=split(num_test, 2000),
        ood={"other": split(6, 3000)},
        fingerprint=f"random-{seed}",
        target_mean=torch.zeros(num_outputs, dtype=torch.float64),
        target_scale=scale,
    )


def fitting_task(model: Model, kind: str, seed: int = 0) -> Task:
    """A small task of that kind with inputs that the model takes.

    10 points to train on and 7 to test; 4 and 3 for images. Raises `AssertionError` with the model's reasons if it
    takes none of `SHAPES`.
    """
    refused: list[str] = []
    for shape, vocabulary in SHAPES.items():
        image = len(shape) > 1
        outputs = 2 if image or kind == "regression" else 3
        sizes = (4, 3) if image else (10, 7)
        task = make_task(kind, shape, outputs, *sizes, seed=seed, vocabulary=vocabulary)
        if found := model_problems(model, task.spec):
            refused += found
            continue
        few = torch.arange(1 if image else 2)
        return replace(task, val=task.val.subset(few), ood={n: s.subset(few) for n, s in task.ood.items()})
    raise AssertionError(f"{model} takes none of the small inputs {list(SHAPES)}: {' '.join(refused)} Pass a task.")


def make_network(
    model: Model,
    task: Task,
    precision: float = 0.7,
    noise: float = 0.3,
    seed: int = 0,
    noise_transform: NoiseTransform | None = None,
) -> Network:
    """An untrained network in float64 with moved norm parameters and running statistics, so that none is trivial."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        module = model.build(task.spec)
        if noise_transform is not None:
            noise_transform.apply(module)
        module = module.double()
        for name, buffer in module.named_buffers():
            if name.endswith("running_mean"):
                buffer.copy_(0.3 * torch.randn_like(buffer))
            if name.endswith("running_var"):
                buffer.copy_(0.5 + torch.rand_like(buffer))
        parameters = {n: p.detach() + 0.05 * torch.randn_like(p) for n, p in module.named_parameters()}
    num_outputs = task.spec.num_outputs
    log_noise = torch.log(noise * torch.linspace(1, 1.5, num_outputs, dtype=torch.float64))
    return Network(
        module=module,
        parameters=parameters,
        buffers=dict(module.named_buffers()),
        likelihood=Gaussian(log_noise) if task.spec.kind == "regression" else Categorical(),
        prior_precision=dict.fromkeys(parameters, precision),
    )


def context(hyper: HyperRule | None = None) -> FitContext:
    """What a fit gets: one epoch of Adam, and `hyper` or the training prior as it is."""
    return FitContext(
        seed=0, hyper=hyper or Fixed(), schedule=Schedule(optimizer="adam", epochs=1, batch_size=16, lr=0.01)
    )


def unlike(x: Tensor) -> Tensor:
    """Points [B, ...] that would move the others in a batch that mixes points: 50 times as large, or other tokens."""
    return 50 * x if x.is_floating_point() else x.flip(1)
