"""Small tasks and networks for numerical tests, in float64 and without files."""

from __future__ import annotations

import torch
from torch import Tensor

from bnn_runner.base import FitContext, HyperRule, Model, Network, NoiseTransform
from bnn_runner.hyper.fixed import Fixed
from bnn_runner.models.likelihoods import Categorical, Gaussian
from bnn_runner.rng import generator
from bnn_runner.tasks import Split, Task, TaskSpec
from bnn_runner.training.schedules import Schedule


def make_task(
    kind: str,
    shape: tuple[int, ...],
    num_outputs: int,
    num_train: int = 40,
    num_test: int = 12,
    seed: int = 0,
    vocabulary: int = 0,
) -> Task:
    """Random inputs; skewed targets with unequal scales, so that a swapped axis or a lost factor shows.

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
    return FitContext(
        seed=0, hyper=hyper or Fixed(), schedule=Schedule(optimizer="adam", epochs=1, batch_size=16, lr=0.01)
    )
