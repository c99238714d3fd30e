"""Every shape of data with every model, both found by globbing conf/: it works, or is refused as the rule says."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch.func import functional_call

from bnn_runner.base import model_problems
from bnn_runner.errors import UserError
from bnn_runner.methods.laplace import Laplace
from bnn_runner.methods.map import MAP
from bnn_runner.tasks import Task, TaskSpec
from bnn_runner.testing.problems import unlike
from tests.choices import CONF, MODELS, choices, exhaustive_unless, first_of_class, make, small_model, target
from tests.problems import context, make_network, make_task

TEXT = TaskSpec("made_up_text", "classification", (9,), 2, 0.1, vocabulary=11)
Shape = tuple[str, tuple[int, ...], bool]


def _specs() -> tuple[dict[Shape, TaskSpec], dict[Shape, list[str]], dict[str, str]]:
    """One specification of each kind and shape of input, the data sets that have it, and those that need a path."""
    specs: dict[Shape, TaskSpec] = {("classification", (9,), True): TEXT}
    names: dict[Shape, list[str]] = {}
    unknown: dict[str, str] = {}
    for name in choices("data"):
        try:
            spec = make("data", name).spec()
        except UserError as error:
            unknown[name] = str(error)
            continue
        shape = (spec.kind, spec.input_shape, bool(spec.vocabulary))
        specs.setdefault(shape, spec)
        names.setdefault(shape, []).append(name)
    return specs, names, unknown


SPECS, DATA, UNKNOWN = _specs()
PAIRS = [(shape, model) for shape in SPECS for model in MODELS]


def _image(least: int = 1) -> Callable[[TaskSpec], bool]:
    return lambda spec: len(spec.input_shape) == 3 and min(spec.input_shape[1:]) >= least


TAKES: dict[str, Callable[[TaskSpec], bool]] = {
    "MLP": lambda spec: not spec.vocabulary,
    "LeNet": _image(16),
    "CNN": _image(2),
    "ResNet18": _image(2),
    "ResNet20": _image(8),
    "WideResNet": _image(4),
    "ViT": lambda spec: _image()(spec) and all(n % 4 == 0 for n in spec.input_shape[1:]),
    "TextTransformer": lambda spec: spec.vocabulary > 0,
    "Torchvision": lambda spec: _image()(spec) and spec.input_shape[0] in (1, 3),
    "SmallConv": lambda spec: _image()(spec) and spec.input_shape[0] == 3 and spec.num_outputs == 2,
}
"""The rule by which each class takes a task, written down a second time."""
FITTING = [(shape, model) for shape, model in PAIRS if TAKES[target("model", model)](SPECS[shape])]


def identify(value: object) -> str:
    return "x".join(map(str, value[1])) + f"-{value[0]}" if isinstance(value, tuple) else str(value)


def test_every_shape_and_model_is_paired() -> None:
    """Planted bugs: a glob that finds nothing; a data set with an unknown specification, dropped silently."""
    listed = {path.stem for path in (CONF / "data").glob("*.yaml")}
    assert {name for found in DATA.values() for name in found} | set(UNKNOWN) == listed and len(listed) >= 20
    assert all("data." in reason for reason in UNKNOWN.values()), UNKNOWN
    assert {("classification", s, False) for s in ((1, 28, 28), (3, 32, 32), (64,))} <= set(SPECS)
    assert len(PAIRS) == len(SPECS) * len(MODELS) and len(SPECS) >= 10 and len(MODELS) >= 22
    assert {shape for shape, _ in FITTING} == set(SPECS)
    assert {model for _, model in FITTING} | {"module"} == set(MODELS)  # a user's own network has outputs of its own
    assert set(TAKES) == {target("model", model) for model in MODELS}
    images = [model for model in MODELS if target("model", model) not in ("TextTransformer", "SmallConv")]
    assert {m for s, m in FITTING if s[1] == (1, 28, 28)} == set(images)
    texts = sum(shape[2] for shape in SPECS)
    assert len(FITTING) >= 2 * len(images) + texts + 4 * (len(SPECS) - 2 - texts)


def test_a_pair_is_refused_by_the_rule_and_with_a_reason() -> None:
    """Planted bugs: a model that takes what it cannot; one that refuses in general; a refusal that names no way out."""
    refused = 0
    for shape, name in PAIRS:
        spec = SPECS[shape]
        problems = model_problems(small_model(name), spec)
        assert (problems == []) is ((shape, name) in FITTING), (shape, name, problems)
        for problem in problems:
            assert spec.name in problem and ("model=" in problem or "model." in problem), problem
            assert problem.endswith(".") and len(problem) > 60, problem
        refused += bool(problems)
    assert refused == len(PAIRS) - len(FITTING) > 0


def _task(spec: TaskSpec) -> Task:
    made = make_task(spec.kind, spec.input_shape, spec.num_outputs, 3, 3, vocabulary=spec.vocabulary)
    return replace(made, spec=spec)


def by_default(shape: Shape, name: str) -> bool:
    """One YAML a class with every shape, and every YAML with the first shape that it takes."""
    return first_of_class("model", name) or shape == next(s for s, model in FITTING if model == name)


@pytest.mark.parametrize(("shape", "name"), exhaustive_unless(by_default, FITTING), ids=identify)
def test_a_pair_works(shape: Shape, name: str) -> None:
    """Forward, batch independence, functional call, one draw of MAP and of a last-layer posterior.

    Planted bugs: a flattened size that is right for one shape of image alone; batch statistics in evaluation mode.
    """
    model, task = small_model(name), _task(SPECS[shape])
    network, x = make_network(model, task), task.test.inputs
    whole = network(x)
    assert whole.shape == (3, task.spec.num_outputs) and bool(torch.isfinite(whole).all())
    crowd = torch.cat([unlike(x[:1]), x[1:2]])
    torch.testing.assert_close(network(crowd)[1], whole[1], rtol=1e-9, atol=1e-9)
    module = network.module.eval()
    with torch.no_grad():
        for n, p in module.named_parameters():
            p.copy_(network.parameters[n])
        torch.testing.assert_close(functional_call(module, network.tensors, (x,)), module(x))
    for method in (MAP(), Laplace(weights="last_layer", structure="kfac")):
        posterior = method.fit(task, [network], context())
        (draw,) = posterior.draws(1, 0)(x)
        assert draw.shape == whole.shape and bool(torch.isfinite(draw).all())
        assert torch.equal(draw, whole) is isinstance(method, MAP)
