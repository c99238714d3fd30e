"""The numbers of another device are those of the CPU; needs BNN_DEVICE=cuda (scripts/gpu_check.sh tests)."""

from __future__ import annotations

import os
from dataclasses import replace
from typing import Any

import pytest
import torch

from bnn_runner.base import Network
from bnn_runner.models.cnn import CNN
from bnn_runner.models.mlp import MLP
from bnn_runner.tasks import Task
from bnn_runner.training.engine import LaneTrainer
from bnn_runner.training.state import Lane
from tests.choices import METHODS, small_method
from tests.problems import context, make_network, make_task
from tests.training.test_lanes import ADAM, config, numbers

DEVICE = torch.device(os.environ.get("BNN_DEVICE") or "cpu")
needs_device = pytest.mark.skipif(DEVICE.type == "cpu", reason="BNN_DEVICE names no accelerator")
GAUSSIAN = [name for name in METHODS if name.startswith("laplace")]


def moved(network: Network, task: Task) -> tuple[Network, Task]:
    """The same network and task on the device, in float64."""
    parameters = {n: p.to(DEVICE) for n, p in network.parameters.items()}
    buffers = {n: b.to(DEVICE) for n, b in network.buffers.items()}
    likelihood: Any = network.likelihood
    if hasattr(likelihood, "log_noise"):
        likelihood = replace(likelihood, log_noise=likelihood.log_noise.to(DEVICE))
    module = network.module.to(DEVICE)
    changed = replace(network, module=module, parameters=parameters, buffers=buffers, likelihood=likelihood)
    return changed, task.to(DEVICE, torch.float64)


@needs_device
@pytest.mark.parametrize("kind", ["regression", "classification"])
@pytest.mark.parametrize("method_name", GAUSSIAN)
def test_posteriors_are_those_of_the_cpu(method_name: str, kind: str) -> None:
    """Planted bugs: TF32 or half precision in the posterior's algebra; noise drawn by the device's own generator."""
    method, task = small_method(method_name), make_task(kind, (3,), 2, num_train=20)
    x = task.test.inputs
    here = method.fit(task, [make_network(MLP((5,)), task)], context())
    expected = here.draws(4, 1)(x)
    network, there_task = moved(make_network(MLP((5,)), task), task)
    there = method.fit(there_task, [network], context())
    torch.testing.assert_close(there.draws(4, 1)(x.to(DEVICE)).cpu(), expected, rtol=1e-6, atol=1e-8)
    if "evidence_nats" in here.report.facts:
        assert there.report.facts["evidence_nats"] == pytest.approx(here.report.facts["evidence_nats"], rel=1e-6)


@needs_device
@pytest.mark.parametrize("shape", [(3,), (2, 8, 8)])
@pytest.mark.parametrize("lanes", [1, 2])
def test_training_is_that_of_the_cpu(shape: tuple[int, ...], lanes: int) -> None:
    """Planted bugs: another order or other initial weights on the device; a fused update with another decay."""
    task = make_task("classification", shape, 2, num_train=20)
    model: Any = MLP((5,)) if len(shape) == 1 else CNN()
    r = config(model, ADAM, stack="always")
    for_cpu = LaneTrainer(r, [Lane(task, s) for s in range(lanes)], torch.device("cpu")).train(None, lambda *_: None)
    there = task.to(DEVICE, torch.float64)
    on_device = LaneTrainer(r, [Lane(there, s) for s in range(lanes)], DEVICE).train(None, lambda *_: None)
    for a, b in zip(for_cpu, on_device, strict=True):
        for name, value in numbers(a).items():
            torch.testing.assert_close(numbers(b)[name].cpu(), value, rtol=1e-5, atol=1e-6, msg=name)
