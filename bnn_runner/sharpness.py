"""The largest curvature of the training loss at a network's weights, which bounds the step of gradient descent."""

from __future__ import annotations

import torch
from torch.func import functional_call

from bnn_runner.base import Network
from bnn_runner.modes import evaluation_mode
from bnn_runner.streams import generator
from bnn_runner.tasks import Task


def sharpness(network: Network, task: Task, points: int = 256, iterations: int = 15) -> float:
    """The largest |eigenvalue| of the Hessian of mean −log p over the first `points` training points, nats.

    By power iteration with exact Hessian-vector products (two backward passes each), norm layers in
    evaluation mode; a lower bound that is near after a few iterations. Gradient descent with momentum β
    is stable up to a learning rate of 2(1+β) over it. Each tensor of the prior adds at most its λ/N.
    """
    x, y = task.train.gather(torch.arange(min(points, len(task.train))))
    assert y is not None
    parameters = {n: p.detach().clone().requires_grad_() for n, p in network.parameters.items()}
    tensors = list(parameters.values())
    random = generator(0, "sharpness")
    v = [torch.randn(p.shape, generator=random).to(p) for p in tensors]
    largest = 0.0
    with torch.enable_grad(), evaluation_mode(network.module):
        outputs = functional_call(network.module, {**network.buffers, **parameters}, (x,))
        loss = -network.likelihood.log_prob(outputs, y).mean()
        grads = torch.autograd.grad(loss, tensors, create_graph=True, materialize_grads=True)
        for _ in range(iterations):
            norm = torch.stack([(t * t).sum() for t in v]).sum().sqrt()
            v = [t / norm for t in v]
            product = torch.stack([(g * t).sum() for g, t in zip(grads, v, strict=True)]).sum()
            hv = torch.autograd.grad(product, tensors, retain_graph=True, materialize_grads=True)
            v = list(hv)
            largest = float(torch.stack([(t * t).sum() for t in v]).sum().sqrt())
            if largest == 0.0:
                break
    return largest
