"""The choices of conf/ found by globbing, made small enough for contract tests."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from bnn_runner.base import Method, Model
from bnn_runner.config.groups import BLOCKS, Catalogue
from bnn_runner.experiment import build
from bnn_runner.testing.methods import MethodCase, fit_case
from bnn_runner.testing.problems import KINDS, fitting_task

CONF = Path(__file__).parents[1] / "conf"
CATALOGUE = Catalogue()


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


SLOW_MODELS = {"torchvision": {"map", "swag"}, "resnet20": {"map", "swag", "laplace", "bbb"}}
"""Networks of many layers take seconds with most methods: plain `pytest` tests these, CI all of them."""


def by_default(method: str, model: str) -> bool:
    """Whether plain `pytest` tests a pair: one YAML a class on every model, and every YAML on one model."""
    if model in SLOW_MODELS:
        return method in SLOW_MODELS[model]
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


def kinds(model_name: str) -> tuple[str, ...]:
    """Both kinds of task for networks on tables; for others, whose output layer is the same, classes alone."""
    spec = fitting_task(small_model(model_name), KINDS[1]).spec
    return KINDS if len(spec.input_shape) == 1 and not spec.vocabulary else KINDS[1:]


@cache
def fitted(method_name: str, model_name: str, kind: str) -> MethodCase:
    """A posterior over untrained networks in float64; one for all tests that do not change it."""
    case = fit_case(small_method(method_name), small_model(model_name), kind)
    assert isinstance(case, MethodCase), case
    return case
