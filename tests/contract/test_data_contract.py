"""What must hold for every data set, found by globbing conf/data; each test names the bug it catches."""

from __future__ import annotations

import dataclasses
import os
from functools import cache
from pathlib import Path

import numpy as np
import pytest
from hydra.utils import get_class, instantiate
from PIL import Image

from bnn_runner.config.groups import Catalogue
from bnn_runner.errors import UserError
from bnn_runner.tasks import DataSet, Task
from bnn_runner.testing import check_choice, check_data

CONF = Path(__file__).parents[2] / "conf"
CATALOGUE = Catalogue()
CHOICES = sorted(path.stem for path in (CONF / "data").glob("*.yaml"))
NO_FILES_NEEDED = {
    "bbb_curve",
    "arrays",
    "breast_cancer",
    "csv",
    "cubic",
    "diabetes",
    "digits",
    "gap1d",
    "hetero1d",
    "line1d",
    "image_folder",
    "two_moons",
    "wine",
}
SMALL = {"train_size": 16, "test_size": 25}

every_choice = pytest.mark.parametrize("choice", CHOICES)


def read_yaml(choice: str) -> dict:
    return CATALOGUE.load("data", choice)


OWN: dict[str, Path] = {}
"""Files for the choices that leave theirs to the user."""


@pytest.fixture(scope="module", autouse=True)
def own_files(tmp_path_factory):
    folder, random = tmp_path_factory.mktemp("own"), np.random.default_rng(0)
    x, y = random.normal(size=(200, 3)), np.arange(200) % 3
    np.savez(folder / "own.npz", x=x, y=y, x_ood_far=9 + x)
    rows = [f"{r[0]:.3f};{r[1]:.3f};{'red' if r[2] > 0 else 'blue'};{k}" for r, k in zip(x, y, strict=True)]
    (folder / "own.csv").write_text("\n".join(["a;b;colour;kind", *rows]))
    for k in range(140):
        (folder / "images" / "ab"[k % 2]).mkdir(parents=True, exist_ok=True)
        pixels = random.integers(0, 256, (9, 12, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(folder / "images" / "ab"[k % 2] / f"{k}.png")
    OWN.update(image_folder=folder / "images")
    OWN.update(csv=folder / "own.csv", arrays=folder / "own.npz")


def build(choice: str, **changes) -> DataSet:
    config = read_yaml(choice)
    config.pop("recommended")
    if choice in OWN:
        config["path"] = OWN[choice]
    return instantiate(config | changes)


@cache
def small_task(choice: str) -> Task | str:
    """A small part of the data set, or the reason why it is not here."""
    data_dir = os.environ.get("BNN_DATA_DIR")
    if data_dir is None and choice not in NO_FILES_NEEDED:
        return "BNN_DATA_DIR is not set"
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("BNN_DATA_URL", "file:///nonexistent")  # tests do not download
        try:
            return build(choice, **SMALL).load(Path(data_dir or "/nonexistent"), 0)
        except UserError as error:
            if "missing" in str(error) and choice not in NO_FILES_NEEDED:
                return str(error)
            raise


def task_or_skip(choice: str) -> Task:
    task = small_task(choice)
    if isinstance(task, str):
        pytest.skip(task)
    return task


@pytest.fixture(scope="module", autouse=True)
def forget_tasks():
    yield
    small_task.cache_clear()


def test_every_choice_is_tested_or_skipped_with_a_reason():
    """Catches: a data set that no test looks at."""
    found = {name.removesuffix(".yaml") for name in os.listdir(CONF / "data") if name.endswith(".yaml")}
    tasks = {choice: small_task(choice) for choice in CHOICES}
    tested = {choice for choice, task in tasks.items() if isinstance(task, Task)}
    skipped = {choice for choice, task in tasks.items() if isinstance(task, str) and task}
    assert len(found) > 0
    assert tested | skipped == found and not tested & skipped
    assert tested >= NO_FILES_NEEDED


@every_choice
def test_the_file_describes_the_class(choice):
    """Catches: a default written twice, a key that the class lacks, a choice that --help cannot explain."""
    config = read_yaml(choice)
    cls = get_class(config["_target_"])
    assert isinstance(check_choice(CONF, "data", choice), DataSet)
    assert all(field.default is dataclasses.MISSING for field in dataclasses.fields(cls))
    assert len(CATALOGUE.help_line("data", choice)) < 130


@every_choice
def test_recommendations_name_what_there_is(choice):
    """Catches: a recommendation for a choice or key that does not exist."""
    recommended = read_yaml(choice)["recommended"]
    assert {"model", "schedule", "prior", "values"} <= set(recommended)
    blocks = [recommended]
    for model, block in (recommended.get("for_model") or {}).items():
        blocks += [recommended | {"model": model} | block] if block is not None else []
    for block in blocks:
        for dotted in block["values"]:
            group, key = dotted.split(".", 1)
            own = group in ("eval", "likelihood")
            assert key in (CATALOGUE.base[group] if own else CATALOGUE.load(group, block[group])), dotted
    small = recommended.get("small", {})
    chosen = recommended | {"data": choice} | {key: value for key, value in small.items() if "." not in key}
    for dotted in (key for key in small if "." in key):
        group, key = dotted.split(".", 1)
        known = CATALOGUE.base[group] if group == "eval" else CATALOGUE.load(group, chosen[group])
        assert key in known, dotted


@every_choice
def test_the_contract_of_a_data_set_holds(choice):
    """Catches: a wrong count of columns or classes, targets of the wrong kind, float copies of images; a size that is
    only about right, a training point that is also a test or validation point; a `prepare` that mixes points, lanes
    [L, B] that are laid out wrongly; global random state in a split, a seed that changes nothing."""
    task = task_or_skip(choice)
    assert len(task.train) == SMALL["train_size"] and len(task.test) == SMALL["test_size"]
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("BNN_DATA_URL", "file:///nonexistent")  # tests do not download
        checked = check_data(build(choice, **SMALL), os.environ.get("BNN_DATA_DIR") or "/nonexistent")
    assert checked.fingerprint == task.fingerprint


@every_choice
def test_all_errors_are_reported_at_once(choice):
    """Catches: a check that stops at the first problem, and a message that does not name the key."""
    wrong = {"val_fraction": 1.5, "train_size": 0, "test_size": -3}
    with pytest.raises(UserError) as caught:
        build(choice, **wrong).spec()
    assert len(caught.value.problems) == 3
    assert all(
        any(f"data.{key} must be" in problem and f"got {value}" in problem for problem in caught.value.problems)
        for key, value in wrong.items()
    )
    too_many = {"train_size": 10**9, "test_size": 10**9}
    with pytest.raises(UserError) as caught:
        build(choice, **too_many).spec()
    assert len(caught.value.problems) == 2
    assert all("must be at most" in problem for problem in caught.value.problems)
