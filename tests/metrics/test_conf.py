"""Every metric's YAML builds its metric, and its keys are exactly the metric's fields."""

import dataclasses
import importlib
from pathlib import Path

import pytest

from bnn_runner.config.groups import Catalogue
from bnn_runner.scoring import Metric
from bnn_runner.testing import check_choice, check_metric

FOLDER = Path(__file__).parents[2] / "conf"
FILES = sorted((FOLDER / "metric").glob("*.yaml"))


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
    check_metric(check_choice(FOLDER, "metric", path.stem))
