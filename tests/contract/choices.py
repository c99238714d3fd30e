"""The choices of conf/ found by globbing, made small enough for contract tests."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import torch
import yaml

from bnn_runner.base import Method, Model, Network, Posterior, Task, model_problems
from bnn_runner.config import build
from bnn_runner.hyper import Fixed
from tests.numerics.small_problems import context, make_network, make_task

CONF = Path(__file__).parents[2] / "conf"
SHAPES = ((3,), (1, 16, 16), (3, 8, 8))
KINDS = ("regression", "classification")


def choices(group: str) -> list[str]:
    """Every YAML of a group but the placeholder."""
    return sorted(path.stem for path in (CONF / group).glob("*.yaml") if path.stem != "recommended")


METHODS, MODELS = choices("method"), choices("model")
STAND_INS = {"module": "tests.contract.own_networks.SmallConv"}
"""For choices that leave their class to the user: one that a user might have."""


def make(group: str, name: str, **changes: Any) -> Any:
    """The object that a YAML describes, some fields changed."""
    node = yaml.safe_load((CONF / group / f"{name}.yaml").read_text())
    node |= {k: v for k, v in changes.items() if k in node}
    if node["_target_"] is None:
        node["_target_"] = STAND_INS[name]
    return build(node, allow=["tests"], where=group, what=f"{group}={name}")


def small_model(name: str) -> Model:
    """As its YAML says, with narrow hidden layers where it has a list of them."""
    node = yaml.safe_load((CONF / "model" / f"{name}.yaml").read_text())
    return make("model", name, hidden=[6] * len(node.get("hidden", [])))


def small_method(name: str) -> Method:
    chains = {"chains": 2, "length": 8.0, "keep": 16, "step": 1e-3, "cycles": 2, "draws": 8, "warmup": 8}
    return make("method", name, size=3, rate=0.5, epochs=3, lr=0.001, **chains, max_leapfrogs=1, force=True)


def fitting_task(model: Model, kind: str, seed: int = 0) -> Task:
    """A small task of that kind whose inputs the model takes: 10 points to train on, 7 to test (4 and 3 for images)."""
    refused: list[str] = []
    for shape in SHAPES:
        image = len(shape) > 1
        outputs = 2 if image or kind == "regression" else 3
        task = make_task(kind, shape, outputs, num_train=4 if image else 10, num_test=3 if image else 7, seed=seed)
        if found := model_problems(model, task.spec):
            assert all("model=" in problem for problem in found)
            refused += found
            continue
        few = torch.arange(1 if image else 2)
        return replace(task, val=task.val.subset(few), ood={n: s.subset(few) for n, s in task.ood.items()})
    raise AssertionError(f"no shape of {SHAPES} suits {model}: {refused}")


def kinds(model_name: str) -> tuple[str, ...]:
    """Both kinds of task; for the large networks, whose output layer is the same, classes alone."""
    model = small_model(model_name)
    module = model.build(fitting_task(model, KINDS[1]).spec)
    return KINDS if sum(p.numel() for p in module.parameters()) < 100_000 else KINDS[1:]


@cache
def fitted(method_name: str, model_name: str, kind: str) -> tuple[Task, list[Network], Method, Posterior]:
    """A posterior over untrained networks in float64; one for all tests that do not change it."""
    model, method = small_model(model_name), small_method(method_name)
    task = fitting_task(model, kind)
    assert method.problems(task.spec, Fixed()) == []
    networks = [make_network(model, task, seed=spec.member, rework=spec.rework) for spec in method.needs()]
    return task, networks, method, method.fit(task, networks, context())
