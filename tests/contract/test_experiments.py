"""Every experiment of conf/ at both sizes: each point of its sweep has only keys that are there; presets name them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from bnn_runner.config.groups import Catalogue, flatten
from bnn_runner.config.overrides import parse
from bnn_runner.config.recommend import keys_of
from bnn_runner.config.validate import Checked, check
from bnn_runner.config.where_rules import SIZES, has_size
from bnn_runner.experiment import load_experiment
from tests.choices import choices
from tests.scripts.loading import script

ROOT = Path(__file__).parents[2]
EXPERIMENTS = choices("experiment")
CATALOGUE = Catalogue()
SIZED = [
    (name, size)
    for name in EXPERIMENTS
    for size in SIZES
    if has_size(CATALOGUE.load("experiment", name).get("where") or {}, size)
]


def checked(name: str, size: str) -> Checked:
    return check([f"experiment={name}", f"size={size}"], multirun=True)


@pytest.mark.parametrize(("name", "size"), SIZED)
def test_every_point_has_only_keys_that_are_there(name: str, size: str) -> None:
    """Planted bugs: a rule for a method sets a key of another method; a rule names an unknown network."""
    found = checked(name, size)
    assert found.jobs >= len(found.points) >= 1
    for point in found.points:
        for override in map(parse, point.additions):
            group, _, rest = override.key.partition(".")
            if override.key in CATALOGUE.groups:
                names = override.value if isinstance(override.value, list) else [override.value]
                assert set(names) <= set(CATALOGUE.choices(group)), (point.choices, override.text)
            elif group in CATALOGUE.groups:
                assert rest in flatten(keys_of(CATALOGUE, group, point.choices)), (point.choices, override.text)
            else:
                assert override.key in {**CATALOGUE.base, **flatten(CATALOGUE.base)}, override.text


@pytest.mark.parametrize("name", [name for name, size in SIZED if size == "paper"])
def test_the_last_point_of_the_paper_is_an_experiment(name: str) -> None:
    """Planted bug: a list given as text, which only the class's own signature refuses."""
    sweeps = [o for o in checked(name, "paper").overrides if o.sweep]
    words = [o.single(o.values[-1]) for o in sweeps]
    experiment = load_experiment([f"experiment={name}", "size=paper", *(f"{o.key}={o.raw}" for o in words)])
    assert experiment.settings.size == "paper" and experiment.choices["experiment"] == name


def test_presets_name_what_is_there() -> None:
    """Planted bug: a preset of an experiment that was renamed; an item of the list without one."""
    presets: list[dict[str, Any]] = yaml.safe_load((ROOT / "scripts" / "presets.yaml").read_text(encoding="utf-8"))
    assert len({p["name"] for p in presets}) == len(presets) > 10
    for preset in presets:
        assert ("run" in preset) != ("script" in preset), preset["name"]
        for line in preset.get("run", ()):
            named = [word.removeprefix("experiment=") for word in line.split() if word.startswith("experiment=")]
            assert named and set(named) <= set(EXPERIMENTS), line
        if "script" in preset:
            assert (ROOT / "scripts" / preset["script"].split()[0]).is_file()
        assert isinstance(preset["minutes"]["small"], int), preset["name"]


def test_a_table_made_anew_is_compared_with_the_kept_one(tmp_path: Path) -> None:
    """Planted bugs: rows of two settings taken for one; a number that is gone passes; a share of the wrong number."""
    differences = script("reproduce").differences
    made, kept = tmp_path / "made.csv", tmp_path / "kept.csv"
    head = "data,model,method,method.rate,kind,n,rmse_mean\n"
    kept.write_text(head + "a,m,x,0.1,regression,3,1.0\na,m,x,0.2,regression,3,2.0\n")
    made.write_text(head + "a,m,x,0.1,regression,3,1.09\na,m,x,0.2,regression,3,1.81\n")
    assert differences({"rmse": 0.1}, made, kept) == []
    made.write_text(head + "a,m,x,0.1,regression,3,1.11\na,m,x,0.2,regression,3,\n")
    assert len(differences({"rmse": 0.1}, made, kept)) == 2
    made.write_text(head + "a,m,x,0.1,regression,3,1.0\n")
    assert "a/m/x/0.2" in differences({"rmse": 0.1}, made, kept)[0]
    for path, value in ((kept, 2.0), (made, 2.3)):
        path.write_text(f"target,sampler,value,holds\nt,SGLD,{value},True\n")
    assert len(differences({"value": 0.1}, made, kept)) == 1 and differences({"value": 0.2}, made, kept) == []
