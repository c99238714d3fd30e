"""Every metric's YAML builds its metric, and its keys are exactly the metric's fields."""

import dataclasses
import importlib
from pathlib import Path

import pytest
import torch

from bnn_runner.config.groups import Catalogue
from bnn_runner.scoring import Evaluation, Metric, SplitEvaluation

FILES = sorted((Path(__file__).parents[2] / "conf" / "metric").glob("*.yaml"))


def build(path):
    settings = Catalogue().load("metric", path.stem)
    module, _, name = settings.pop("_target_").rpartition(".")
    return getattr(importlib.import_module(module), name), settings


def test_there_are_metrics():
    assert len(FILES) >= 12


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_yaml_and_class_agree(path):
    first, second = path.read_text().splitlines()[:2]
    assert first == f"# @package metric.{path.stem}"  # Hydra reads it from the first line only
    assert second.startswith("# ")
    cls, settings = build(path)
    assert list(settings) == [field.name for field in dataclasses.fields(cls)]
    metric = cls(**settings)
    assert isinstance(metric, Metric) and metric.__dataclass_params__.frozen and cls.__doc__


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_scores_are_a_pure_function_of_evaluation_and_seed(path):
    cls, settings = build(path)
    probs = torch.softmax(torch.randn(1, 60, 3, generator=torch.Generator().manual_seed(0)).double(), -1)
    y = torch.arange(60) % 3
    loglik = probs[0, torch.arange(60), y].log().unsqueeze(0)
    split = SplitEvaluation(torch.arange(60), loglik, y, probs[0], torch.zeros(60))
    evaluation = Evaluation(
        "classification", "draws", True, True, torch.zeros(1), {"test": split, "val": split, "ood/x": split}
    )
    state = torch.random.get_rng_state()
    first, second = cls(**settings)(evaluation, 3), cls(**settings)(evaluation, 3)
    assert repr(first) == repr(second)
    assert torch.equal(state, torch.random.get_rng_state())
    assert all(type(score.value) is float for score in first)
    assert all(score.better in ("higher", "lower", "") for score in first)
