"""The choices of conf/ found by globbing, made small enough for contract tests."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import yaml

from bnn_runner.base import Method, Model, Network, Posterior, Task
from bnn_runner.config import build
from bnn_runner.hyper import Fixed
from tests.numerics.helpers import context, make_network, make_task

CONF = Path(__file__).parents[2] / "conf"
SHAPES = ((3,), (1, 16, 16), (3, 8, 8))
KINDS = ("regression", "classification")


def choices(group: str) -> list[str]:
    """Every YAML of a group but the placeholder."""
    return sorted(path.stem for path in (CONF / group).glob("*.yaml") if path.stem != "recommended")


METHODS, MODELS = choices("method"), choices("model")


def make(group: str, name: str, **changes: Any) -> Any:
    """The object that a YAML describes, some fields changed."""
    node = yaml.safe_load((CONF / group / f"{name}.yaml").read_text())
    return build(node | {k: v for k, v in changes.items() if k in node}, where=group, what=f"{group}={name}")


def small_model(name: str) -> Model:
    """As its YAML says, with narrow hidden layers where it has a list of them."""
    node = yaml.safe_load((CONF / "model" / f"{name}.yaml").read_text())
    return make("model", name, hidden=[6] * len(node.get("hidden", [])))


def small_method(name: str) -> Method:
    return make("method", name, size=3)


def fitting_task(model: Model, kind: str, num_train: int = 10, seed: int = 0) -> Task:
    """A small task of that kind whose inputs the model takes."""
    refused = []
    for shape in SHAPES:
        task = make_task(kind, shape, 3 if kind == "classification" else 2, num_train=num_train, num_test=7, seed=seed)
        refused += model.problems(task.spec)
        if not model.problems(task.spec):
            return task
    raise AssertionError(f"no shape of {SHAPES} suits {model}: {refused}")


@cache
def fitted(method_name: str, model_name: str, kind: str) -> tuple[Task, list[Network], Method, Posterior]:
    """A posterior over untrained networks in float64; one for all tests that do not change it."""
    model, method = small_model(model_name), small_method(method_name)
    task = fitting_task(model, kind)
    assert method.problems(task.spec, Fixed()) == []
    networks = [make_network(model, task, seed=spec.member) for spec in method.needs()]
    return task, networks, method, method.fit(task, networks, context())
