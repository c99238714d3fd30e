"""Curves of a table's rows side by side."""

import pytest
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from bnn_runner.report import style
from bnn_runner.report.read_cells import find_cells
from bnn_runner.report.sweep_curves import _panels, sweep_curves
from bnn_runner.report.tables import build


def score(metric, value, **more):
    return {"metric": metric, "value": value, "better": "higher"} | more


@pytest.fixture
def shifted(write_cell):
    for seed in (0, 1):
        joint = [score("joint_loglik", -tau * (1 + seed), tau=tau) for tau in (1, 2, 5)]
        dyadic = [score("dyadic_loglik", -10.0 * kappa, tau=10 * kappa, kappa=kappa) for kappa in (1, 2)]
        levels = [score("shift_accuracy", 0.9, split="shift/clean/0")]
        levels += [score("shift_accuracy", 0.9 - level / 100, split=f"shift/rotation/{level}") for level in (30, 5, 60)]
        folder = write_cell("laplace", seed, [*joint, *dyadic, *levels], kind="classification")
        (folder / "history.csv").write_text(
            "member,epoch,loss,nll\n0,1,2.0,1.5\n0,2,1.0,0.5\n1,1,2.0,2.5\n1,2,1.0,nan\n"
        )
    write_cell("map", 0, [score("joint_loglik", -1.0, tau=1)], kind="classification")
    return write_cell


def test_curves_hold_the_scores_per_point_in_order(shifted):
    """Planted bugs: blocks not divided by tau; levels in the order of their names; the clean points left out."""
    rows = build(find_cells(shifted.outputs)).rows
    panels = {p.title: p for p in _panels(rows)}
    assert list(panels) == ["joint", "dyadic", "rotation: accuracy", "training"]
    place = next(i for i, row in enumerate(rows) if row.group.key.method == "laplace")
    assert all(list(p.curves) == [place] for p in panels.values())
    curve = panels["joint"].curves[place]
    assert curve == [(1, -1.5, 0.5), (2, -1.5, 0.5), (5, -1.5, 0.5)]  # s.e. of -1 and -2
    assert [(at, mean) for at, mean, _ in panels["dyadic"].curves[place]] == [(1, -1.0), (2, -1.0)]
    shift = panels["rotation: accuracy"]
    assert shift.across == "degrees" and [at for at, _, _ in shift.curves[place]] == [0, 5, 30, 60]
    assert shift.curves[place][-1][1] == pytest.approx(0.3)
    # Two members of two seeds; NaN is left out. s.e. of (1.5, 2.5, 1.5, 2.5): √(1/3)/2.
    assert panels["training"].curves[place] == [(1, 2.0, pytest.approx((1 / 12) ** 0.5)), (2, 0.5, 0.0)]


def test_the_figure_is_drawn_where_there_is_a_curve(shifted, write_cell, tmp_path, is_picture):
    found = build(find_cells(shifted.outputs))
    assert is_picture(sweep_curves(found, tmp_path / "curves.png"))
    write_cell("map", 0, root=tmp_path / "other")
    assert sweep_curves(build(find_cells(tmp_path / "other")), tmp_path / "none.png") is None
    assert not (tmp_path / "none.png").exists()


@pytest.mark.parametrize("length", [5, 30, 45, 60])
def test_a_legend_lies_within_its_figure(length):
    """Planted bug: four columns whatever the labels, the outer ones cut off."""
    labels = [
        f"{i} hidden=[50, 50] epochs={i} laplace_kfac hyper=evidence lr"[:length].ljust(length, "e") for i in range(13)
    ]
    width = 10.8
    columns = style.legend_columns(labels, width, 4)
    figure = Figure(figsize=(width, 5))
    style.legend_below(figure, [style.handle(style.colour(i), "o") for i in range(13)], labels, columns)
    FigureCanvasAgg(figure).draw()
    box = figure.legends[0].get_window_extent()
    assert box.x0 >= 0 and box.x1 <= width * figure.dpi
    assert columns == {5: 4, 30: 4, 45: 3, 60: 2}[length]
