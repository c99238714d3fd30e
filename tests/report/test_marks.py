"""Marks: what a run's facts say about its row reaches every table and format, and biased rows are never bold."""

from __future__ import annotations

import csv
import io
import json

import pytest

from bnn_runner.report import marks
from bnn_runner.report.axes import by_axes
from bnn_runner.report.columns import Column
from bnn_runner.report.filters import parse_filters
from bnn_runner.report.page import to_html
from bnn_runner.report.paired import paired_differences
from bnn_runner.report.read_cells import find_cells
from bnn_runner.report.render import report_of, to_csv, to_latex, to_markdown
from bnn_runner.report.tables import build

FACTS = {
    "unmixed_chains": {"rhat": 1.3},
    "no_gradient_noise": {"gradient_noise": False},
    "one_function": {"function_diversity": 0.001},
    "worse_than_centre": {"worse_than_centre": True},
    "large_decrement": {"newton_decrement_nats": 30.0, "mode": "network"},
    "evidence_below_constant": {"evidence_below_constant": True},
    "precision_at_bound": {"hyper_status": "at bound"},
    "search_not_converged": {"hyper_status": "not converged"},
}
GOOD = {
    "rhat": 1.01,
    "gradient_noise": True,
    "function_diversity": 0.5,
    "newton_decrement_nats": 30.0,
    "mode": "tangent",
}


@pytest.fixture
def marked(write_cell):
    """marked(method, facts of each seed, value): three seeds with these facts."""

    def put(method, facts, value):
        for seed, own in enumerate(facts):
            score = {"metric": "rmse", "value": value + 0.001 * seed, "standard_error": 0.001}
            folder = write_cell(method, seed, [score])
            content = json.loads((folder / "cell.json").read_text())
            (folder / "cell.json").write_text(json.dumps(content | {"report": own}))

    put.outputs = write_cell.outputs
    return put


def test_every_kind_is_decided_by_facts():
    """Planted bugs: a kind without a fact; a decrement where the evidence is taken at v*; a limit that moved."""
    assert set(FACTS) == {kind.name for kind in marks.KINDS}
    for name, facts in FACTS.items():
        assert marks.kinds_of(facts) == (name,)
    assert marks.kinds_of(GOOD | {"hyper_status": "converged", "worse_than_centre": False}) == ()
    for name in ("large_decrement", "evidence_below_constant"):  # nobody looks at the evidence there
        assert marks.kinds_of(FACTS[name] | {"selected_by": "validation"}) == ()
    assert marks.kinds_of({"rhat": None, "newton_decrement_nats": None}) == ()
    from bnn_runner.laplace import newton_decrement
    from bnn_runner.mcmc import summary
    from bnn_runner.posteriors import function_diversity

    limits = newton_decrement.FAR_NATS, summary.RHAT_LIMIT, function_diversity.LEAST_DIVERSITY
    assert limits == (marks.FAR_NATS, marks.RHAT_LIMIT, marks.LEAST_DIVERSITY)


def test_marks_and_footnotes_are_in_every_format(marked):
    """Planted bugs: a mark in one format only; a letter without a footnote; a seed's mark taken for all seeds'."""
    marked("map", [{}] * 3, 2.0)
    marked("swag", [FACTS["no_gradient_noise"]] * 3, 1.5)
    marked("laplace", [FACTS["large_decrement"], GOOD, GOOD], 1.0)
    table = build(find_cells(marked.outputs))
    page = report_of(table)
    for text in (to_markdown(page), to_latex(page), to_html(page, "t")):
        assert "swag [a]" in text and "laplace [b]" in text and "map [" not in text
        assert "[a] All training points were in one batch" in text
        assert "In some seeds only: yacht/mlp/laplace (1 of 3 seeds)." in text
    records = {r["method"]: r["marks"] for r in csv.DictReader(io.StringIO(to_csv(table)))}
    assert records == {"map": "", "swag": "no_gradient_noise", "laplace": "large_decrement"}
    (grid,) = by_axes(table, ["method"], ["data"], "mean")
    assert {line.words[0]: line.texts("mean")[-1][-4:] for line in grid.lines}["swag"] == " [a]"
    (grid,) = by_axes(table, ["data", "method"], [], "mean")
    assert ("yacht", "swag [a]", "3") in [line.words for line in grid.lines]
    grid = paired_differences(table, parse_filters(["method=map"], ""), "mean")
    assert {line.words[2] for line in grid.lines} == {"swag [a]", "laplace [b]"}


def test_a_biased_row_is_never_bold(marked):
    """Planted bug: chains that have not mixed are bold."""
    marked("map", [{}] * 3, 2.0)
    marked("sgld", [FACTS["unmixed_chains"], {}, {}], 1.0)
    assert build(find_cells(marked.outputs)).best(Column("rmse")) == set()
    marked("swag", [FACTS["no_gradient_noise"]] * 3, 0.5)
    table = build(find_cells(marked.outputs))
    assert [table.rows[i].group.key.method for i in table.best(Column("rmse"))] == ["swag"]
