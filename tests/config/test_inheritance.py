"""Variants of one class inherit their YAML: our reader and Hydra agree, and a variant holds only what differs."""

from __future__ import annotations

from itertools import zip_longest
from typing import Any

import pytest
import yaml
from hydra import compose, initialize_config_dir
from omegaconf import OmegaConf

from bnn_runner.config.groups import GLOBAL_GROUPS, RECOMMENDED, Catalogue, flatten, merge, packaged_conf
from bnn_runner.config.recommend import expand

CATALOGUE = Catalogue()
GROUPS = [group for group in CATALOGUE.groups if group not in GLOBAL_GROUPS]
SEPARATE = {("sgld", "csgld"), ("mnist", "cifar10")}
"""Files of one class that do not inherit: one has keys that the other must not have, or all recommendations differ."""


def raw(group: str, choice: str) -> dict[str, Any]:
    """The keys of the file itself."""
    return dict(yaml.safe_load(CATALOGUE.groups[group][choice].read_text(encoding="utf-8")) or {})


def bases(group: str, choice: str) -> list[str]:
    """The choices of the same group that the file inherits from."""
    return [e.partition("@")[0] for e in raw(group, choice).get("defaults", []) if e != "_self_"]


@pytest.mark.exhaustive
@pytest.mark.parametrize("which", ["inheriting", pytest.param("all", marks=pytest.mark.exhaustive)])
def test_hydra_and_our_reader_agree_on_every_choice(which: str) -> None:
    """Planted bugs: `_self_` before the base; a metric whose base lands in its own package; a merge that replaces."""
    lists = {group: [c for c in CATALOGUE.choices(group) if c != RECOMMENDED] for group in GROUPS}
    metrics = lists.pop("metric")
    if which == "inheriting":
        lists = {group: [c for c in named if bases(group, c)][:3] for group, named in lists.items()}
    seen = 0
    with initialize_config_dir(config_dir=str(packaged_conf()), version_base="1.3"):
        for row in zip_longest(*lists.values()):
            chosen = {group: choice for group, choice in zip(lists, row, strict=True) if choice is not None}
            overrides = [f"{group}={choice}" for group, choice in chosen.items()]
            tree: Any = OmegaConf.to_container(
                compose("config", overrides=[*overrides, f"metric=[{','.join(metrics)}]"])
            )
            for group, choice in chosen.items():
                assert tree[group] == merge(CATALOGUE.shared.get(group, {}), CATALOGUE.load(group, choice)), choice
            assert tree["metric"] == {name: CATALOGUE.load("metric", name) for name in metrics}
            seen += len(chosen)
    assert seen == sum(map(len, lists.values())) > (100 if which == "all" else 5) and len(metrics) >= 14


@pytest.mark.parametrize("group", GROUPS)
def test_a_variant_holds_only_what_differs(group: str) -> None:
    """Planted bugs: a copied key; a variant that names no base; a base after `_self_`."""
    first: dict[str, str] = {}
    for choice in CATALOGUE.choices(group):
        own = raw(group, choice)
        found = bases(group, choice)
        if not found:
            target = own.get("_target_")
            if target is not None and (other := first.setdefault(target, choice)) != choice:
                assert (choice, other) in SEPARATE or (other, choice) in SEPARATE, f"{choice} repeats {other}"
            continue
        assert own.pop("defaults")[-1] == "_self_", choice
        inherited = flatten(CATALOGUE.load(group, found[0]))
        copied = [key for key, value in flatten(own).items() if key in inherited and inherited[key] == value]
        assert len(found) == 1 and not copied, f"{choice} repeats {copied} of {found}"


@pytest.mark.parametrize(("data", "base"), [("mnist_rotated", "mnist"), ("cifar10_corrupted", "cifar10")])
def test_shifted_test_images_do_not_change_the_training(data: str, base: str) -> None:
    """What is recommended for the same training images is the same, so that trained networks are shared.

    Planted bug: a recommendation for one network that only the base has (both had it).
    """
    models = CATALOGUE.load("data", base)["recommended"]["for_model"]
    assert len(models) >= 3
    for model in models:
        plain, shifted = (expand([f"data={name}", f"model={model}"]) for name in (base, data))
        assert plain.overrides[1:] == shifted.overrides[1:] and plain.notes == shifted.notes == []
