"""Colours and markers: one for each method, the same in every figure of a report; and the check of text in figures."""

from pathlib import Path

import pytest
from matplotlib.colors import to_hex

from bnn_runner.cli.report import main
from bnn_runner.report import style
from bnn_runner.report.looks import METHODS, look, looks_of
from tests.pictures import problems_of

CONF = Path(__file__).parents[2] / "conf" / "method"


def test_every_method_has_a_look_of_its_own():
    """Planted bugs: two methods with one colour and marker; a method of the user's that takes another's."""
    names = [path.stem for path in CONF.glob("*.yaml")]
    found = looks_of([(name,) for name in [*names, "weight_noise", "mine"]])
    assert len(names) >= 30 and len(set(found.values())) == len(found) == len(names) + 2
    assert all(found[name,] == look(name) == METHODS[name] for name in names)


def test_a_method_keeps_its_look_whatever_else_is_there():
    """Planted bug: colours by place in the table, so that a method that is added shifts the others."""
    few, many = looks_of([("map",), ("swag",)]), looks_of([("map",), ("bbb",), ("laplace",), ("swag",)])
    assert few["swag",] == many["swag",] == look("swag") and few["map",] == many["map",]
    rows = looks_of([("map", "5"), *(("swag", str(i)) for i in range(5))])
    assert len(set(rows.values())) == 6 and rows["swag", "0"] == look("swag")
    alone = looks_of([("laplace", str(i)) for i in range(20)])
    assert len(set(alone.values())) == 20 and [alone["laplace", str(i)].colour for i in range(8)] == [*style.COLOURS]


@pytest.fixture
def all_figures(write_cell):
    """Cells of three methods that have every figure of a report."""
    import json

    for place, method in enumerate(("map", "laplace_full", "laplace_kfac")):
        for seed in range(3):
            base = -1.0 + 0.2 * place + 0.01 * seed
            fields = {"better": "higher", "unit": "nats per point"}
            scores = [{"metric": "marginal_loglik", "value": base, **fields}]
            scores += [{"metric": "joint_loglik", "tau": t, "value": t * base, **fields} for t in (1, 5, 10)]
            dyadic = {"metric": "dyadic_loglik", **fields}
            scores += [dyadic | {"tau": 10 * k, "kappa": k, "value": 9 * k * base} for k in (1, 2, 5)]
            folder = write_cell(method, seed, scores, hash8=f"{place}000abcd", config={"method._target_": "Laplace"})
            seconds = {"seconds": {"posterior": 1.0 + place + 0.1 * seed, "evaluation": 0.1}}
            (folder / "provenance.json").write_text(json.dumps(seconds))
            if place:
                facts = json.loads((folder / "cell.json").read_text())
                facts["report"] = {"evidence_nats": -50.0 - 30 * place - seed, "evidence_over": "all weights"}
                facts["report"] |= {"structure": method.removeprefix("laplace_"), "mode": "network"}
                facts["config"]["method.structure"] = method.removeprefix("laplace_")
                (folder / "cell.json").write_text(json.dumps(facts))
    return write_cell.outputs


def colours_in(figure):
    """The colours of markers, lines and bars of a figure."""
    from matplotlib.lines import Line2D
    from matplotlib.patches import Rectangle

    lines = [line.get_color() for line in figure.findobj(Line2D) if line.get_marker() not in ("", "None", None, "|")]
    return {to_hex(c).upper() for c in [*lines, *(bar.get_facecolor() for bar in figure.findobj(Rectangle))]}


def test_a_method_has_one_colour_in_every_figure_of_a_report(all_figures, seen_figures):
    """Planted bugs: a figure that counts its own rows; markers that are assigned by rank."""
    assert main(["--output-dir", str(all_figures), "--cost", "--evidence", "--name", "a"]) == 0
    names = {"a.png", "a_curves.png", "a_cost.png", "a_evidence.png", "a_structures.png", "a_marginal_dyadic.png"}
    assert set(seen_figures) == names
    own = {method: look(method).colour.upper() for method in ("map", "laplace_full", "laplace_kfac")}
    others = {one.colour.upper() for one in METHODS.values()} - set(own.values())
    for name, figure in seen_figures.items():
        found = colours_in(figure)
        without = {own["map"]} if name in ("a_evidence.png", "a_structures.png") else set()
        assert set(own.values()) - without <= found and not others & found, name


def test_text_that_is_cut_overlaps_or_is_small_is_found():
    """The check of the figures finds what it is for."""
    figure, (ax,) = style.new_figure(width=4, height=3)
    ax.set_xlabel("input")
    assert problems_of(figure) == []
    ax.text(0.5, 0.5, "one word")
    ax.text(0.52, 0.5, "another")
    ax.text(0.1, 0.2, "tiny", fontsize=5)
    figure.text(0.9, 0.95, "a line that leaves the figure")
    found = " ".join(problems_of(figure))
    assert "'one word' and 'another' overlap" in found and "'tiny' is shown at 5.0 pt" in found
    assert "'a line that leaves the figure' is cut off" in found
    wide, _ = style.new_figure(columns=4, width=4)
    assert any("shown at 5.0 pt" in problem for problem in problems_of(wide))
