"""The override language as we read it (Hydra's own parser is the reference), and `recommended`."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
from hydra.core.override_parser.overrides_parser import OverridesParser

from bnn_runner.config.overrides import UNKNOWN, parse, quote, render, to_text
from bnn_runner.config.recommend import expand
from bnn_runner.errors import UserError

READABLE = [
    "seed=3",
    "a.b=-1.5",
    "a=1e-3",
    "a=1_000",
    "a=inf",
    "a=null",
    "a=TRUE",
    "a=",
    "a=text with spaces",
    "a=/path/to-x.y",
    "a=007",
    "a='quoted, text = 1'",
    'a="double"',
    r"a='it\'s'",
    r"a=b\,c",
    "a=[1,2.5,x,[y,'z,w']]",
    "a=[]",
    "a={x:1,y:[2,3]}",
    "+a=1",
    "++a.b=2",
    "~a",
    "a=x,y,3",
    "a=choice(1,2,x)",
    "a=range(1,4)",
    "a=[1,2],[3]",
    "g/sub=x",
    "g@pkg=x",
]


@pytest.mark.parametrize("text", READABLE)
def test_reads_what_hydra_reads(text: str) -> None:
    theirs = OverridesParser.create().parse_override(text)
    ours = parse(text)
    assert ours.sweep == theirs.is_sweep_override()
    assert ours.key == theirs.key_or_group
    if theirs.is_delete():
        return
    if ours.sweep:
        values = list(theirs.sweep_iterator())
        assert [to_text(v) for v in ours.values] == [str(v).replace(", ", ",") for v in values]
    else:
        value = theirs.value()
        assert ours.value == value and type(ours.value) is type(value)
    again = OverridesParser.create().parse_override(render(ours))
    assert again.key_or_group == theirs.key_or_group and again.is_sweep_override() == theirs.is_sweep_override()


@pytest.mark.parametrize("text", ["a=b=c", "a=x#y", "a=(", "a=[1,2", "a='open", "a=ü", "a=f(1)", "a=b!c"])
def test_refuses_what_hydra_refuses_and_shows_the_quoted_form(text: str) -> None:
    with pytest.raises(Exception):  # noqa: B017 - whichever of Hydra's errors
        OverridesParser.create().parse_override(text)
    with pytest.raises(UserError) as caught:
        parse(text)
    message = str(caught.value)
    shown = message[message.rindex("'a=") + 1 : message.rindex("'")]
    advised = OverridesParser.create().parse_override(shown)
    assert advised.value() == text[2:].strip("'")


def test_interpolations_are_left_to_hydra() -> None:
    assert parse("a=${seed}").value is UNKNOWN
    assert parse("a=int(3.7)").value is UNKNOWN


def test_home_folder_needs_no_quotes() -> None:
    assert parse("data_dir=~/data").value == "~/data"
    assert OverridesParser.create().parse_override(render(parse("data_dir=~/data"))).value() == "~/data"


@pytest.mark.parametrize(
    "value", [1, 1.5, 1e-7, True, None, "x", "a=1,b=2", "true", "3", "", 'say "hi"', "ü", [1, "b c"], {"k": [1]}]
)
def test_values_survive_being_written(value: object) -> None:
    assert OverridesParser.create().parse_override(f"a={to_text(value)}").value() == value
    assert parse(f"a={to_text(value)}").value == value


def test_nan_is_a_number() -> None:
    assert math.isnan(parse("a=nan").value)


# ------------------------------------------------------------------------------------- recommended


def expanded(overrides: list[str], toys: Path) -> dict[str, object]:
    return {o.key: o.value for o in map(parse, expand(overrides, [toys]).overrides)}


def test_recommendation_is_filled_in(toys: Path) -> None:
    found = expanded(["data=toy", "method=toyfit"], toys)
    assert found["model"] == "toynet" and found["schedule"] == "sgd"
    assert found["prior"] == "layerwise" and found["hyper"] == "fixed"
    assert found["model.hidden"] == [7] and found["schedule.epochs"] == 11
    assert found["eval.num_draws"] == 12 and found["method.steps"] == 5
    assert "count" in found["metric"]  # type: ignore[operator]


def test_what_was_typed_wins(toys: Path) -> None:
    typed = ["data=toy", "method=toyfit", "schedule.epochs=2", "model.hidden=[1,1]", "metric=[count]"]
    found = expanded(typed, toys)
    assert found["schedule.epochs"] == 2 and found["model.hidden"] == [1, 1] and found["metric"] == ["count"]
    assert len(expand(typed, [toys]).overrides) == len(found), "a key is there twice"


def test_values_go_with_their_choice(toys: Path) -> None:
    found = expanded(["data=toy", "method=map", "schedule=adam"], toys)
    assert "schedule.epochs" not in found, "epochs were recommended for sgd"
    assert found["model.hidden"] == [7]
    assert "method.steps" not in found, "a wish about one method concerns no other"


def test_recommendation_for_another_model(toys: Path) -> None:
    found = expanded(["data=toy", "model=mlp"], toys)
    assert found["schedule"] == "adam" and found["model.hidden"] == [9] and found["schedule.epochs"] == 13
    assert found["prior"] == "layerwise" and found["eval.num_draws"] == 12


def test_pair_without_recommendation_gets_family_defaults_and_says_so(toys: Path) -> None:
    found = expand(["data=toy", "model=lenet"], [toys])
    overrides, notes = found.overrides, found.notes
    assert {"schedule=adam", "prior=isotropic", "hyper=auto", "eval.num_draws=12"} <= set(overrides)
    assert not any(o.startswith(("schedule.", "model.")) for o in overrides)
    assert len(notes) == 1 and "lenet" in notes[0] and "schedule=adam" in notes[0]
    found = expand(["data=bare"], [toys])
    overrides, notes = found.overrides, found.notes
    assert "model=mlp" in overrides and len(notes) == 1


def test_experiment_counts_as_typed(toys: Path) -> None:
    found = expanded(["experiment=toys"], toys)
    assert found["model"] == "toynet", "the experiment's data set recommends"
    assert "schedule.epochs" not in found, "the experiment sets it"
    assert expanded(["experiment=toys", "data=gap1d"], toys)["model"] == "mlp", "the command line beats the experiment"


def test_an_experiment_sets_keys_where_they_apply(toys: Path) -> None:
    """Planted bugs: a rule of another method is taken; a rule beats what was typed; the paper's network is not."""
    point = ["experiment=sized", "seed=1"]
    found = expanded([*point, "method=toyfit"], toys)
    assert found["method.steps"] == 8 and found["model"] == "toynet" and "schedule.epochs" not in found
    assert "method.steps" not in expanded([*point, "method=map"], toys)
    paper = expanded([*point, "method=toyfit", "size=paper"], toys)
    assert paper["method.steps"] == 9 and paper["model"] == "mlp" and paper["schedule.epochs"] == 90
    assert paper["schedule"] == "adam", "what is recommended for the paper's network"
    assert paper["seed"] == 1, "a point of the sweep has its own"
    typed = expanded([*point, "method=toyfit", "size=paper", "method.steps=2", "model=toynet"], toys)
    assert typed["method.steps"] == 2 and typed["model"] == "toynet" and "data.shift" not in typed
    assert expanded([*point, "data.size=4"], toys)["data.shift"] == 0.25, "a key that is swept tells, too"


def test_a_rule_that_is_none_is_told(toys: Path) -> None:
    (toys / "experiment" / "sized.yaml").write_text("# @package _global_\nwhere: {toyfit: {method.steps: 3}}\n")
    with pytest.raises(UserError, match="must be a condition and a mapping; got 'toyfit'"):
        expand(["experiment=sized"], [toys])


@pytest.mark.parametrize(
    "typed",
    [
        [],
        ["data=toy"],
        ["data=toy", "model=lenet"],
        ["experiment=toys"],
        ["experiment=sized", "size=paper", "seed=1"],
        ["++schedule.lr=0.3"],
    ],
)
def test_expanding_twice_changes_nothing(typed: list[str], toys: Path) -> None:
    once = expand(typed, [toys]).overrides
    found = expand(once, [toys])
    twice, notes = found.overrides, found.notes
    assert twice == once and notes == []


def test_quote_escapes() -> None:
    assert quote('a"b') == '"a\\"b"'
