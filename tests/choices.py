"""The choices of conf/ found by globbing, made small enough for contract tests."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from bnn_runner.base import Method, Model, Network, Posterior, model_problems
from bnn_runner.config.groups import BLOCKS, Catalogue
from bnn_runner.experiment import build
from bnn_runner.hyper.fixed import Fixed
from bnn_runner.tasks import Task
from tests.problems import context, make_network, make_task

CONF = Path(__file__).parents[1] / "conf"
CATALOGUE = Catalogue()
SHAPES = {(3,): 0, (1, 16, 16): 0, (3, 8, 8): 0, (5,): 7}
"""Shapes of small inputs, with the vocabulary where they are token ids."""
KINDS = ("regression", "classification")


def choices(group: str) -> list[str]:
    """Every YAML of a group but the placeholder."""
    return sorted(path.stem for path in (CONF / group).glob("*.yaml") if path.stem != "recommended")


METHODS, MODELS = choices("method"), choices("model")
LARGEST_BLOCK = 1200
STAND_INS = {"module": "tests.user_networks.SmallConv"}
"""For choices that leave their class to the user: one that a user might have."""


@cache
def target(group: str, name: str) -> str:
    """The class that a YAML describes."""
    found: str | None = CATALOGUE.load(group, name)["_target_"]
    return (found or STAND_INS[name]).rpartition(".")[2]


def one_of_each(models: list[str]) -> list[str]:
    """All variants of the perceptron, which cost little, and the first model of every other class."""
    first = {target("model", name): name for name in reversed(models)}
    return [name for name in models if target("model", name) == "MLP" or first[target("model", name)] == name]


@cache
def first_of_class(group: str, name: str) -> bool:
    """Whether a YAML is the first one of its class, in the order of the names."""
    return name == next(other for other in choices(group) if target(group, other) == target(group, name))


PLAIN_MODEL = "mlp"
"""The model that every method's YAML is tested with by default."""


def by_default(method: str, model: str) -> bool:
    """Whether plain `pytest` tests a pair: one YAML a class on every model, and every YAML on one model."""
    return model == PLAIN_MODEL or first_of_class("method", method)


def exhaustive_unless(default: Callable[..., bool], cases: list[Any]) -> list[Any]:
    """Parameters for pytest.mark.parametrize; those that are not in the default run are marked `exhaustive`.

    A case is a tuple of parameters or a single one; `default` is called with them.
    """
    marked = []
    for case in cases:
        values = case if isinstance(case, tuple) else (case,)
        marked.append(pytest.param(*values, marks=() if default(*values) else pytest.mark.exhaustive))
    return marked


def make(group: str, name: str, /, **changes: Any) -> Any:
    """The object that a YAML describes, some fields changed."""
    node = CATALOGUE.load(group, name)
    node.pop(BLOCKS.get(group), None)
    node |= {k: v for k, v in changes.items() if k in node}
    if node["_target_"] is None:
        node["_target_"] = STAND_INS[name]
    return build(node, allow=["tests"], where=group, what=f"{group}={name}")


NARROW: dict[str, dict[str, Any]] = {
    "CNN": {"channels": [4, 6], "kernels": [5, 3], "groups": 2},
    "ResNet18": {"widths": [2, 4], "blocks": [1, 1], "groups": 2},
    "WideResNet": {"depth": 10, "widen": 2, "base": 1},
    "ViT": {"width": 4, "depth": 1, "heads": 2, "patch": 4},
    "TextTransformer": {"width": 4, "depth": 1, "heads": 2},
    "Torchvision": {
        "name": "mobilenet_v3_small",
        "options": {"width_mult": 0.05, "reduced_tail": True, "dropout": 0.0},
    },
}
"""Fields that make a model small for the tests, by its class; a list of `hidden` widths is made narrow anyway."""


@cache
def small_model(name: str) -> Model:
    """As its YAML says, but narrow."""
    node = CATALOGUE.load("model", name)
    return make("model", name, hidden=[6] * len(node.get("hidden", [])), **NARROW.get(target("model", name), {}))


@cache
def small_method(name: str) -> Method:
    chains = {"chains": 2, "length": 8.0, "keep": 16, "step": 1e-3, "cycles": 2, "draws": 8, "warmup": 8}
    few = {"max_leapfrogs": 1, "samples": 4, "probes": 2}
    return make("method", name, size=3, rate=0.5, epochs=3, lr=0.001, force=True, **chains, **few)


def fitting_task(model: Model, kind: str, seed: int = 0) -> Task:
    """A small task of that kind whose inputs the model takes: 10 points to train on, 7 to test (4 and 3 for images)."""
    refused: list[str] = []
    for shape, vocabulary in SHAPES.items():
        image = len(shape) > 1
        outputs = 2 if image or kind == "regression" else 3
        sizes = (4, 3) if image else (10, 7)
        task = make_task(kind, shape, outputs, *sizes, seed=seed, vocabulary=vocabulary)
        if found := model_problems(model, task.spec):
            assert all("model=" in problem for problem in found)
            refused += found
            continue
        few = torch.arange(1 if image else 2)
        return replace(task, val=task.val.subset(few), ood={n: s.subset(few) for n, s in task.ood.items()})
    raise AssertionError(f"no shape of {list(SHAPES)} suits {model}: {refused}")


@cache
def largest_block(model_name: str, whole: bool) -> int:
    """Weights of the largest layer of a small model, or of all of it."""
    model = small_model(model_name)
    module = model.build(fitting_task(model, KINDS[1]).spec)
    return max(sum(p.numel() for p in m.parameters(recurse=whole)) for m in module.modules())


def too_large(method_name: str, model_name: str) -> bool:
    """Whether a pair takes a test too long (or is refused): exact blocks of wide layers, mixtures of large networks.

    The members of a mixture are posteriors of method=laplace, which every model is tested with.
    """
    mixture = target("method", method_name) == "EnsembleLaplace"
    if getattr(small_method(method_name), "structure", "") != "block" and not mixture:
        return False
    return largest_block(model_name, whole=mixture) > LARGEST_BLOCK


def unlike(x: Tensor) -> Tensor:
    """Points that would move the others if batches were mixed: 50 times as large, or other tokens."""
    return 50 * x if x.is_floating_point() else x.flip(1)


def kinds(model_name: str) -> tuple[str, ...]:
    """Both kinds of task for networks on tables; for others, whose output layer is the same, classes alone."""
    spec = fitting_task(small_model(model_name), KINDS[1]).spec
    return KINDS if len(spec.input_shape) == 1 and not spec.vocabulary else KINDS[1:]


@cache
def fitted(method_name: str, model_name: str, kind: str) -> tuple[Task, list[Network], Method, Posterior]:
    """A posterior over untrained networks in float64; one for all tests that do not change it."""
    model, method = small_model(model_name), small_method(method_name)
    task = fitting_task(model, kind)
    assert method.problems(task.spec, Fixed()) == []
    networks = [
        make_network(model, task, seed=spec.member, noise_transform=spec.noise_transform) for spec in method.needs()
    ]
    return task, networks, method, method.fit(task, networks, context())
