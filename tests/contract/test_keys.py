"""Every setting stands on exactly one list of `config.keys`; the keys change with what they must change with."""

from __future__ import annotations

import copy
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from bnn_runner.config import keys
from bnn_runner.config.recommend import expand
from bnn_runner.experiment import build, compose
from tests.choices import METHODS, choices, exhaustive_unless, first_of_class

DATA = choices("data")


@cache
def composed(*overrides: str) -> dict[str, Any]:
    """The resolved configuration, as a run has it."""
    return compose(expand(overrides).overrides)


def configuration(data: str, method: str) -> dict[str, Any]:
    """Data set and method are groups of their own, so every pair is put together from one composition of each."""
    return {**composed(f"data={data}"), "method": composed(f"method={method}")["method"]}


def changed(value: Any) -> Any:
    """Some other value of the same type."""
    if isinstance(value, bool):
        return not value
    if isinstance(value, (int, float)):
        return value + 1
    if isinstance(value, (list, tuple)):
        return [*value, 1]
    return 7 if value is None else f"{value}x"


def with_changed(config: dict[str, Any], key: str) -> dict[str, Any]:
    other = copy.deepcopy(config)
    *path, last = key.split(".")
    node = other
    for name in path:
        node = node[name]
    node[last] = changed(node[last])
    return other


def training(config: dict[str, Any], kind: str = "regression", **changes: Any) -> str:
    return keys.training_key(config, kind, **{"fingerprint": "f", "lane_seed": 1, "extras": ()} | changes)


def test_a_new_results_version_keeps_the_trained_networks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Planted bug: the results version in the training key, so that a new row of a table trains every network again."""
    config = configuration("gap1d", "laplace")
    key, cell = training(config), keys.cell_hash(config, True, False)
    monkeypatch.setattr(keys, "RESULTS_VERSION", keys.RESULTS_VERSION + 1)
    assert training(config) == key
    assert keys.cell_hash(config, True, False) != cell
    monkeypatch.setattr(keys, "TRAINING_VERSION", keys.TRAINING_VERSION + 1)
    assert training(config) != key


def test_the_lists_do_not_meet() -> None:
    """Planted bug: a prefix on two lists, so that the last one read wins."""
    prefixes = [p for listed in keys.LISTS.values() for p in listed]
    assert len(prefixes) == len(set(prefixes)) > 0


@pytest.mark.parametrize(
    ("group", "name"),
    exhaustive_unless(first_of_class, [("data", name) for name in DATA] + [("method", name) for name in METHODS]),
)
def test_every_setting_stands_on_exactly_one_list(group: str, name: str) -> None:
    """Planted bug: a new top-level key that shapes results and is on no list, so that two runs share a cell.

    The list of a key depends on its name only, so every data set and every method is looked at once, not every pair.
    """
    flat = keys.flatten(composed(f"{group}={name}"))
    assert not any(k.startswith(("defaults", "hydra", "data.recommended")) for k in flat)
    for key in flat:
        listed = [
            name for name, prefixes in keys.LISTS.items() if any(key == p or key.startswith(f"{p}.") for p in prefixes)
        ]
        assert listed, f"{key} is on no list of bnn_runner.config.keys"
        assert keys.list_of(key) in listed
        assert len(listed) == 1 or key in ("data.test_size", "model.weights", "model.weights_entry"), (
            f"{key} is on {listed}"
        )
    assert {
        "data.val_fraction",
        "model._target_",
        "method._target_",
        "eval.num_draws",
        "prior.precision",
    } <= flat.keys()


@pytest.mark.parametrize(
    ("data", "method"), [("gap1d", "laplace"), ("two_moons", "ensemble"), ("mnist", "map"), ("yacht", "laplace_kfac")]
)
def test_the_training_key_changes_with_what_shapes_training_and_with_nothing_else(data: str, method: str) -> None:
    """Planted bugs: a schedule field left out of the key (a stale network); a number of draws in it (trained again)."""
    config = configuration(data, method)
    key = training(config)
    assert key == training(copy.deepcopy(config))
    tried = {"changes": 0, "stays": 0}
    for name in keys.flatten(config):
        moves = keys.list_of(name) == "training" and not name.startswith("data.") and name != "seed"
        assert (training(with_changed(config, name)) != key) is moves, name
        tried["changes" if moves else "stays"] += 1
    assert min(tried.values()) > 10
    # Data enter by their content, the seed by the lane, and a method's own needs by extras.
    assert (
        len(
            {
                key,
                training(config, fingerprint="g"),
                training(config, lane_seed=2),
                training(config, extras=(("rate", 0.1),)),
            }
        )
        == 4
    )


def test_noise_settings_do_not_shape_a_classifier() -> None:
    config = configuration("two_moons", "map")
    other = with_changed(config, "likelihood.noise")
    assert training(config, "classification") == training(other, "classification")
    assert training(config) != training(other)


@pytest.mark.parametrize(("data", "method"), [("gap1d", "laplace"), ("mnist", "laplace_kfac")])
def test_the_cell_id_changes_with_everything_but_metrics_and_places(data: str, method: str) -> None:
    """Planted bugs: a metric's setting in the id (evaluated again for nothing); the prior rule left out of it."""
    config = configuration(data, method)
    cell = keys.cell_hash(config, uses_hyper=True, finite=False)
    for name in keys.flatten(config):
        other = keys.cell_hash(with_changed(config, name), uses_hyper=True, finite=False)
        assert (other != cell) is (keys.list_of(name) != "never"), name


def test_what_cannot_matter_is_no_part_of_the_cell_id() -> None:
    """Planted bug: MAP run again because hyper= or eval.num_draws= was swept."""
    config = configuration("gap1d", "map")
    cell = keys.cell_hash(config, uses_hyper=False, finite=True)
    for name in keys.flatten(config):
        same = keys.list_of(name) == "never" or name.startswith("hyper.") or name == "eval.num_draws"
        other = keys.cell_hash(with_changed(config, name), uses_hyper=False, finite=True)
        assert (other == cell) is same, name


@pytest.mark.parametrize("data", ["gap1d", "two_moons", "digits"])
def test_the_fingerprint_follows_the_training_points_and_not_the_test_points(data: str) -> None:
    """Planted bugs: a smaller test set that trains again; another validation part that does not."""
    node = composed(f"data={data}")["data"]

    def fingerprint(seed: int = 0, **changes: Any) -> str:
        found: str = build(node | changes, where="data").load(Path("/nonexistent"), seed).fingerprint
        return found

    base = fingerprint()
    assert base == fingerprint() == fingerprint(test_size=20)
    others = {"seed": 1, "val_fraction": 0.2, "train_size": 30} | {k: 0.3 for k in ("noise",) if k in node}
    found = [base, *(fingerprint(**{k: v}) for k, v in others.items())]
    if "num_train" in node:
        found.append(fingerprint(num_train=60))
        assert fingerprint(num_test=node["num_test"] + 10) == base
    assert len(set(found)) == len(found)
