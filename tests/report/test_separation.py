"""Bold type: Student's t, Holm's rule, errors over seeds and points, and how often a table of nothing is bold."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest

from bnn_runner.report.columns import Column
from bnn_runner.report.differences import Difference, Measured, difference, lower_bound
from bnn_runner.report.page import to_html
from bnn_runner.report.point_scores import FILE, META, PointScores, read_points
from bnn_runner.report.read_cells import find_cells
from bnn_runner.report.render import report_of, to_latex, to_markdown
from bnn_runner.report.separation import Candidate, compare, detectable, separated
from bnn_runner.report.student import holm, quantile, two_sided
from bnn_runner.report.tables import build


def test_student_agrees_with_scipy():
    stats = pytest.importorskip("scipy.stats")
    for freedom, t in itertools.product((1, 2, 3, 4, 5, 19, 50), (0.0, 0.3, 2.0, 6.0, 40.0)):
        assert two_sided(t, freedom) == pytest.approx(2 * stats.t.sf(t, freedom), rel=1e-5, abs=1e-12)
    for freedom, level in itertools.product((1, 2, 4, 19), (0.3, 0.05, 0.001)):
        assert quantile(level, freedom) == pytest.approx(stats.t.isf(level / 2, freedom), rel=1e-6)
    assert math.isnan(two_sided(math.nan, 3))


def test_holm_takes_one_step_after_another():
    """Planted bugs: 5 % for each by itself; Bonferroni for all; a NaN that does not count."""
    assert holm([0.04, 0.04], 0.05) == [False, False]
    assert holm([0.04, 0.02], 0.05) == [True, True]
    assert holm([0.04, 0.02, math.nan], 0.05) == [False, False, False]
    assert holm([], 0.05) == []


def seeds(values, points=None, error=0.01, shared=True):
    """Scores by seed; `points` [n, M] are those of each seed."""
    found = {}
    for s, value in enumerate(values):
        kept = (
            None if points is None else PointScores(points[s], "u" if shared else f"u{s}", "t" if shared else f"t{s}")
        )
        found[s] = Measured(value, error, lambda kept=kept: kept)
    return found


def test_errors_over_seeds_and_points():
    """Planted bugs: points that are not paired; the larger error only, where both are of different things."""
    rng = np.random.default_rng(0)
    common, own = rng.normal(size=400), rng.normal(size=(3, 400)) * 0.1
    one, two = common + own, np.tile(common, (3, 1))
    found = difference(seeds(one.mean(1), one), seeds(two.mean(1), two))
    gaps = own.mean(1)
    assert found.mean == pytest.approx(gaps.mean()) and found.n == 3 and found.shared
    assert found.over_seeds == pytest.approx(gaps.std(ddof=1) / math.sqrt(3))
    assert found.over_points == pytest.approx(own.mean(0).std(ddof=1) / 20)
    assert found.error == pytest.approx(math.hypot(found.over_seeds, found.over_points))
    apart = difference(seeds(one.mean(1), one, shared=False), seeds(two.mean(1), two, shared=False))
    each = own.std(axis=1, ddof=1) / 20
    assert apart.over_points == pytest.approx(math.sqrt((each**2).sum()) / 3) and not apart.shared
    assert apart.error == max(apart.over_seeds, apart.over_points)
    unknown = difference(seeds(one.mean(1)), seeds(two.mean(1)))
    assert unknown.over_points == pytest.approx(0.01 * math.sqrt(2)), "without points the errors are independent"
    nothing = difference(seeds(one.mean(1), error=math.nan), seeds(two.mean(1)))
    assert math.isnan(nothing.error) and nothing.p_value == 1.0
    assert lower_bound(seeds(one.mean(1)), seeds(two.mean(1))) <= unknown.p_value


def test_rows_with_seeds_of_their_own_are_compared_unpaired():
    one = {s: Measured(v, 0.1, lambda: None) for s, v in enumerate((1.0, 1.2, 1.4))}
    two = {s + 7: Measured(v, 0.1, lambda: None) for s, v in enumerate((2.0, 2.2, 2.4, 2.6))}
    found = difference(one, two)
    assert found.mean == pytest.approx(-1.1) and found.n == 3
    assert found.over_seeds == pytest.approx(math.hypot(0.2 / math.sqrt(3), 0.258199 / 2), rel=1e-4)
    assert found.over_points == pytest.approx(0.1 * math.sqrt(2))


def test_ties_and_few_seeds_are_never_significant():
    """Planted bug: two seeds that tie in their difference have standard error 0, and one test image is bold."""
    assert Difference(0.001, 2, 0.0, 0.0, True).p_value == 1.0
    assert Difference(0.5, 2, 0.001, 0.001, True).p_value == 1.0, "two seeds"
    assert Difference(0.001, 3, 0.0, 0.0, True).p_value == 1.0
    assert Difference(0.5, 3, 0.001, 0.001, True).p_value < 0.001
    best = Candidate(0, seeds((0.91, 0.91), error=0.01))
    assert compare([best, Candidate(1, seeds((0.90, 0.90), error=0.01))], 1.0).p_value == 1.0


def test_the_detectable_difference_is_the_limit():
    """Planted bug: the limit without Holm's rule. A difference just above it is bold, one just below is not."""
    rng = np.random.default_rng(1)
    noise = rng.normal(size=(3, 200))
    rival = Candidate(1, seeds(np.zeros(3), np.zeros((3, 200))))
    others = [compare([Candidate(0, seeds((0.0, 1.0, 5.0))), Candidate(1, seeds((0.0, 1.5, 4.0)))], 1.0)] * 4

    def outcome(shift):
        values = noise - noise.mean() + shift
        return compare([Candidate(0, seeds(values.mean(1), values)), rival], 1.0)

    limit = detectable(outcome(5.0), 5)
    assert separated([outcome(1.001 * limit), *others])[0] and not separated([outcome(0.999 * limit), *others])[0]
    assert math.isnan(detectable(compare([Candidate(0, seeds((1.0, 2.0))), Candidate(1, seeds((0.0, 0.1)))], 1.0), 5))


def null_table(rng, methods, columns, n, points, between, correlation, splits, ties):
    """Comparisons of a table in which no method differs from another, as `Table.comparisons` makes them.

    A score at a point is a sum of the point's difficulty, shared by all methods with weight `correlation`, one of the
    method at the point, one of the seed and method (standard deviation `between`), and noise. With `ties`, scores are
    rounded to single test points.
    """
    outcomes = []
    for _ in range(columns):
        difficulty = rng.normal(size=(n if splits else 1, points))
        candidates = []
        for m in range(methods):
            of_method = rng.normal(size=difficulty.shape)
            own = math.sqrt(correlation) * difficulty + math.sqrt(1 - correlation) * of_method
            values = own + between * rng.normal(size=(n, 1)) + 0.2 * rng.normal(size=(n, points))
            if ties:
                values = (values > 0).astype(float)
            kept = seeds(values.mean(1), values, shared=not splits)
            candidates.append(Candidate(m, kept))
        outcomes.append(compare(candidates, 1.0))
    return outcomes


NAMES = ("methods", "columns", "n", "points", "between", "correlation", "splits", "ties")
CASES = [
    dict(zip(NAMES, case, strict=True))
    for case in (
        (2, 1, 3, 50, 0.3, 0.5, False, False),
        (2, 1, 3, 200, 0.0, 0.9, False, False),
        (2, 1, 4, 40, 0.05, 0.9, True, False),
        (2, 6, 3, 50, 0.3, 0.5, False, False),
        (6, 3, 5, 50, 0.2, 0.95, False, False),
        (4, 4, 3, 30, 0.1, 0.99, True, False),
        (3, 2, 3, 30, 0.0, 0.95, False, True),
        (2, 3, 5, 30, 0.3, 0.5, True, True),
        (5, 4, 2, 50, 0.3, 0.5, False, True),
        (5, 4, 1, 50, 0.3, 0.5, False, False),
    )
]


def share_of_bold_tables(case, tables, seed):
    rng = np.random.default_rng(seed)
    return sum(any(separated(null_table(rng, **case))) for _ in range(tables)) / tables


def test_a_table_of_nothing_is_rarely_bold():
    """Planted bug: two standard errors, which make every third table of six columns bold (a run of every size)."""
    tables = 60
    bold = sum(tables * share_of_bold_tables(case, tables, i) for i, case in enumerate(CASES))
    count = tables * len(CASES)
    assert bold / count <= 0.05 + 3 * math.sqrt(0.05 * 0.95 / count)
    two = [0, 0]
    rng = np.random.default_rng(0)
    for _ in range(100):
        outcomes = null_table(rng, 2, 6, 3, 50, 0.3, 0.5, False, False)
        two[0] += any(abs(o.second.mean) > 2 * o.second.over_seeds for o in outcomes)
        two[1] += any(separated(outcomes))
    assert two[0] > 30 and two[1] < 12, "the old rule, which this test must reject"


@pytest.mark.exhaustive
@pytest.mark.parametrize("case", CASES, ids=lambda c: f"{c['methods']}x{c['columns']}n{c['n']}{'s' * c['splits']}")
def test_a_table_of_nothing_is_bold_in_one_of_twenty_at_most(case):
    tables = 3000
    assert share_of_bold_tables(case, tables, 11) <= 0.05 + 3 * math.sqrt(0.05 * 0.95 / tables)


def test_a_real_difference_is_bold():
    """Planted bug: a rule so careful that nothing is ever bold. One standard deviation of the seeds is 0.02 here."""
    rng = np.random.default_rng(3)
    found = 0
    for _ in range(20):
        shared = rng.normal(size=500)
        noise = 0.02 * rng.normal(size=(2, 5, 1)) + 0.1 * rng.normal(size=(2, 5, 500))
        one, two = 0.3 + shared + noise[0], shared + noise[1]
        outcome = compare([Candidate(0, seeds(one.mean(1), one)), Candidate(1, seeds(two.mean(1), two))], 1.0)
        nothing = compare([Candidate(0, seeds((0, 1, 2))), Candidate(1, seeds((2, 0, 1)))], 1.0)
        found += separated([outcome, nothing])[0]
    assert found == 20


def put_points(folder, key, values, units, test_set):
    import json

    meta = np.frombuffer(json.dumps({key: [units, test_set]}).encode(), dtype=np.uint8)
    np.savez(folder / FILE, **{key: np.asarray(values, dtype=np.float32), META: meta})


def three_methods(write_cell, gap):
    """Three methods and seeds on one test set of 200 points; the best is better by `gap`."""
    rng = np.random.default_rng(5)
    shared = rng.normal(size=200)
    for place, (method, shift) in enumerate((("map", 0.5), ("ensemble", gap), ("laplace", 0.0))):
        for seed in range(3):
            points = 5 + shared + shift + 0.05 * rng.normal(size=200) + 0.005 * rng.normal()
            score = {"metric": "rmse", "value": points.mean(), "standard_error": points.std() / 14}
            other = score | {"metric": "joint_loglik_effective_draws", "better": "higher", "value": -points.mean()}
            folder = write_cell(method, seed, [score, other], hash8=f"{place}000abcd")
            put_points(folder, "rmse", points, "u", "t")


def test_one_meaning_of_bold_in_every_format(write_cell):
    """Planted bugs: unpaired points (their errors are .07 here, the gap is .1); bold diagnostics."""
    three_methods(write_cell, 0.1)
    table = build(find_cells(write_cell.outputs), "all")
    assert table.best(Column("rmse")) == {2} and not table.best(Column("joint_loglik_effective_draws"))
    page = report_of(table)
    assert to_markdown(page).count("**") == 2 and to_latex(page).count("\\textbf{") == 1
    assert "Holm" in page.legend and "rmse 0.0" in page.legend
    assert to_html(page, "t").count("<b>") == 1
    (next(write_cell.outputs.glob("runs/*/*/laplace/0-*")) / FILE).write_bytes(b"rubbish")
    assert not build(find_cells(write_cell.outputs)).best(Column("rmse")), "without points the errors do not cancel"


def test_a_single_seed_has_the_error_of_its_points(write_cell):
    """Planted bug: shown as if it were over seeds."""
    for method, value in (("map", 1.0), ("laplace", 0.5)):
        write_cell(method, 0, [{"metric": "rmse", "value": value, "standard_error": 0.012}])
    page = report_of(build(find_cells(write_cell.outputs)))
    text = to_markdown(page)
    assert "1.000 (0.012)" in text and "±" not in text.split("Mean ±")[0]
    assert "In parentheses, of a single seed: standard error over the test points." in text
    assert "No number is bold" in text and "3 seeds" in text


def test_points_of_a_cell(tmp_path):
    assert read_points(tmp_path, "rmse") is None
    put_points(tmp_path, "rmse", [1.0, 2.0], "u", "t")
    found = read_points(tmp_path, "rmse")
    assert found is not None and list(found.values) == [1.0, 2.0] and (found.units, found.test_set) == ("u", "t")
    assert read_points(tmp_path, "ece") is None
