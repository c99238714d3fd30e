"""The largest curvature of the training loss at a network's weights, which bounds the step of gradient descent."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.func import functional_call

from bnn_runner.base import Network
from bnn_runner.curvature.lanczos import largest_eigenvalue
from bnn_runner.rng import generator
from bnn_runner.runtime.torch_state import evaluation_mode, plain_attention
from bnn_runner.tasks import Task


def sharpness(network: Network, task: Task, points: int = 256, steps: int = 20, tolerance: float = 0.01) -> float:
    """The largest |eigenvalue| of the Hessian of mean −log p over the first `points` training points, nats.

    Computed by at most `steps` Lanczos steps with exact Hessian-vector products (two backward passes each), in
    evaluation mode; a lower bound (see `largest_eigenvalue`). Gradient descent with momentum β is stable up to a
    learning rate of 2(1+β) divided by it. The prior adds at most λ/N.
    """
    x, y = task.train.gather(torch.arange(min(points, len(task.train))))
    assert y is not None
    parameters = {n: p.detach().clone().requires_grad_() for n, p in network.parameters.items()}
    tensors = list(parameters.values())
    random = generator(0, "sharpness")
    start = torch.cat([torch.randn(p.shape, generator=random).flatten() for p in tensors]).to(tensors[0])
    with torch.enable_grad(), evaluation_mode(network.module), plain_attention():
        outputs = functional_call(network.module, {**network.buffers, **parameters}, (x,))
        loss = -network.likelihood.log_prob(outputs, y).mean()
        grads = torch.autograd.grad(loss, tensors, create_graph=True, materialize_grads=True)
        slope = torch.cat([g.flatten() for g in grads])

        def product(v: Tensor) -> Tensor:
            hv = torch.autograd.grad(slope @ v[0], tensors, retain_graph=True, materialize_grads=True)
            return torch.cat([t.flatten() for t in hv])[None]

        return float(largest_eigenvalue(product, start[None], steps, tolerance))
