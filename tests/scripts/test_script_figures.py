"""Figures of the scripts: a method has its own colour there too, and no text overlaps, is cut off or is too small."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from matplotlib.colors import to_hex
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from bnn_runner.report import style
from bnn_runner.report.looks import METHODS, look
from bnn_runner.tasks import Split
from tests.scripts.loading import SCRIPTS, script


def line_colours(figure: Figure) -> set[str]:
    """The colours of lines and markers, those of ticks and grids left out."""
    own = {id(line) for ax in figure.axes for line in ax.lines}
    return {to_hex(line.get_color()).upper() for line in figure.findobj(Line2D) if id(line) in own}


def test_gap_methods_draws_each_method_in_its_colour(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seen_figures: dict[str, Figure]
) -> None:
    """Planted bugs: one colour for all methods; more columns than a page is wide."""
    monkeypatch.syspath_prepend(str(SCRIPTS))
    gap = script("gap_methods")
    names = list(gap.METHODS)
    found = [
        gap.Distance(n, s, 0.1 * i + 0.01 * s, 0.0, 0.0, 0.0, 0.0, 1.0, 0.0, 1.3 if "g" in n else None, None, "")
        for i, n in enumerate([*names, gap.OWN])
        for s in (0, 1, 2)
    ]
    gap.draw_distances(gap.summaries(found), tmp_path / "distances.png")
    x = torch.linspace(-1, 1, 60).double()
    one = torch.ones(1)
    points = Split(x[:20, None].float(), x[:20, None].float(), torch.arange(20))
    task = SimpleNamespace(train=points, input_mean=one, input_scale=one, target_mean=one, target_scale=one)
    mixtures = {n: gap.Mixture(one.double(), 0.1 * i + x[None], torch.ones(1, 1).double()) for i, n in enumerate(names)}
    places = gap.Places({}, x[:, None].float(), x, ["gap"] * 60)
    gap.draw(found, mixtures, places, task, tmp_path / "panels.png")
    for figure in seen_figures.values():
        shown = {look(n).colour.upper() for n in names if n != gap.REFERENCE}
        others = {one.colour.upper() for one in METHODS.values()} - shown - {look(gap.REFERENCE).colour.upper()}
        assert shown <= line_colours(figure) and not others & line_colours(figure)


def test_curves_of_the_evidence_have_the_colours_of_their_methods(
    tmp_path: Path, seen_figures: dict[str, Figure]
) -> None:
    curves = script("evidence_curves")
    points = {
        data: {
            arm: [
                curves.Point(data, arm, e, -1 / e, -2 / e, 0.5 / e, -90.0 * e if e % 3 == 0 else None)
                for e in range(1, 12)
            ]
            for arm in curves.ARMS
        }
        for data in curves.TASKS
    }
    curves.draw(points, tmp_path / "curves.png")
    assert line_colours(seen_figures["curves.png"]) == {look("map").colour.upper(), look("laplace").colour.upper()}
    normalised = script("normalised_evidence")
    rows = [normalised.Row("d", 10.0**k, "", -50.0 + k, -40.0 - k, 1.0, -0.5, -1.5 + 0.1 * k) for k in range(-2, 5)]
    figure, axes = style.new_figure(1, 3, width=3.3, height=2.9)
    choices = {"network": rows[3], "tangent": rows[4]}
    normalised.curves(axes[1], rows, choices)
    normalised.logliks(axes[2], rows, choices)
    style.save(figure, tmp_path / "normalised.png")


def test_a_combined_figure_keeps_the_size_of_its_pictures(
    tmp_path: Path, seen_figures: dict[str, Figure], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Planted bugs: pictures that are shrunk, and their text with them; more in a row than a page is wide."""
    reproduce = script("reproduce")
    groups = []
    for i in range(3):
        cell = SimpleNamespace(path=tmp_path / str(i))
        picture, (ax,) = style.new_figure(width=4.9, height=3.0)
        ax.set_xlabel("input")
        style.title(picture, "toy · mlp · laplace · seed 0")
        style.save(picture, cell.path / "figures" / "bands.png")
        groups.append(SimpleNamespace(done={0: cell}, key=SimpleNamespace(data="toy", method="laplace")))
    monkeypatch.setattr(reproduce, "group_cells", lambda cells: (groups, []))
    texts = {"hyper.family": ["isotropic", "groupwise", "g"]}
    monkeypatch.setattr(reproduce, "distinguishing_fields", lambda groups: texts)
    reproduce.montage([], "bands.png", tmp_path / "all.png")
    figure = seen_figures["all.png"]
    assert figure.get_size_inches() == pytest.approx([9.8, 6.5], abs=0.01)
    assert [t.get_text() for t in figure.texts] == ["family=isotropic", "family=groupwise", "family=g"]
    assert [ax.get_position().width * 9.8 for ax in figure.axes] == pytest.approx([4.9] * 3)
