"""Rows ranked by evidence and by test log-likelihood."""

import csv
import json

import pytest

from bnn_runner.cli.report import main
from bnn_runner.report.evidence import rankings
from bnn_runner.report.read_cells import find_cells
from bnn_runner.report.tables import build


@pytest.fixture
def laplace_cell(write_cell):
    """laplace_cell(model, seed, evidence, test log-likelihood, ...)."""

    def write(model, seed, evidence, loglik, over="all weights", decrement=0.1, mode="tangent", below=False, **more):
        score = {"metric": "marginal_loglik", "value": loglik, "better": "higher", "unit": "nats per point"}
        folder = write_cell("laplace", seed, [score], model=model, **more)
        facts = json.loads((folder / "cell.json").read_text())
        facts["report"] = {"evidence_nats": evidence, "evidence_over": over, "mode": mode}
        facts["report"] |= {"newton_decrement_nats": decrement, "evidence_below_constant": below}
        (folder / "cell.json").write_text(json.dumps(facts))
        return folder

    write.outputs = write_cell.outputs
    return write


@pytest.fixture
def four_models(laplace_cell):
    """Evidence and test agree but for the two in the middle; two seeds each."""
    for model, evidence, loglik in (("a", -90, -1.0), ("b", -80, -0.6), ("c", -70, -0.7), ("d", -60, -0.5)):
        for seed in (0, 1):
            laplace_cell(model, seed, evidence + 2 * seed, loglik)
    return laplace_cell


def test_rows_are_ranked_by_their_mean_evidence(four_models):
    """Planted bugs: the smallest first; ranks of one seed; a rank correlation of the values."""
    (found,) = rankings(build(find_cells(four_models.outputs)))
    assert [r.row.group.key.model for r in found.rows] == ["d", "c", "b", "a"]
    assert [r.ranks for r in found.rows] == [(1, 1), (2, 3), (3, 2), (4, 4)]
    assert found.rows[0].evidence.mean == -59 and found.rows[0].evidence.standard_error == pytest.approx(1)
    assert found.correlation == pytest.approx(0.8)  # 1 − 6·2/(4·15)


def test_evidence_over_other_weights_or_data_is_ranked_apart(four_models):
    """Planted bug: the evidence of a last layer, which is larger, above those of whole networks."""
    for model in ("a", "b"):
        four_models(model, 7, -5.0, -0.4, over="last-layer weights", config={"method.weights": "last_layer"})
        four_models(model, 0, 300.0, -2.0, data="boston")
    found = rankings(build(find_cells(four_models.outputs)))
    assert sorted((r.data, r.over, len(r.rows)) for r in found) == [
        ("boston", "all weights", 2),
        ("yacht", "all weights", 4),
        ("yacht", "last-layer weights", 2),
    ]
    tied = next(r for r in found if r.data == "boston")
    assert [r.ranks for r in tied.rows] == [(1.5, 1.5), (1.5, 1.5)] and tied.correlation != tied.correlation


def test_an_evidence_below_a_constant_predictors_is_shown_and_not_ranked(four_models):
    """Planted bugs: it takes a rank; ranks of the others with a hole; one flagged seed of two that counts."""
    from bnn_runner.report.evidence import evidence_grids

    four_models("e", 0, -1.0, -3.0, below=True)
    four_models("e", 1, -1.0, -3.0)
    (found,) = rankings(build(find_cells(four_models.outputs)))
    assert [r.row.group.key.model for r in found.rows] == ["d", "c", "b", "a", "e"]
    assert [r.ranks for r in found.rows][:4] == [(1, 1), (2, 3), (3, 2), (4, 4)] and not found.rows[4].ranked
    assert found.correlation == pytest.approx(0.8)
    (grid,) = evidence_grids(build(find_cells(four_models.outputs)))
    assert grid.lines[-1].words[:3] == ("—", "—", "e") and "over 4 rows: 0.80" in grid.note
    assert "below that of a constant predictor: e laplace" in grid.note


def test_a_row_is_named_by_what_it_has(laplace_cell):
    """Planted bug: a setting that only another model has, as `channels=—`."""
    for place, (settings, epochs) in enumerate([({"model.channels": 8}, 5), ({"model.channels": 16}, 5), ({}, 7)]):
        more = {"hash8": f"0000000{place}", "config": settings | {"schedule.epochs": epochs}}
        laplace_cell("cnn" if settings else "mlp", 0, -10.0 - place, -1.0, **more)
    laplace_cell("mlp", 0, -14.0, -1.0, hash8="00000004", config={"schedule.epochs": 9})
    (found,) = rankings(build(find_cells(laplace_cell.outputs)))
    assert [r.name for r in found.rows] == [
        "cnn laplace channels=8 epochs=5",
        "cnn laplace channels=16 epochs=5",
        "mlp laplace epochs=7",
        "mlp laplace epochs=9",
    ]


def test_one_command_writes_table_and_figure(four_models, is_picture, capsys, write_cell):
    write_cell("map", 0, [{"metric": "marginal_loglik", "value": -0.9, "better": "higher"}], model="a")
    assert main(["--output-dir", str(four_models.outputs), "--evidence", "--name", "architectures"]) == 0
    results = four_models.outputs / "results"
    assert is_picture(results / "architectures_evidence.png")
    text = (results / "architectures.md").read_text()
    assert "yacht: ranked by evidence over all weights" in text and "over 4 rows: 0.80" in text
    assert "not at the optimum" not in text
    table = (results / "architectures_tables.csv").read_text().splitlines()
    rows = [r for r in csv.DictReader(table) if "evidence" in r["table"]]
    first = [r for r in rows if r["by evidence"] == "1"]
    assert first[0]["model"] == "d" and float(first[0]["mean"]) == -59 and first[0]["mode"] == "tangent"
    assert "architectures_evidence.png" in capsys.readouterr().out


def test_evidence_far_from_its_optimum_is_not_ranked(laplace_cell):
    """Planted bugs: a decrement of 40 nats between evidences 5 nats apart; one taken at v*; without its command."""
    from bnn_runner.report.evidence import evidence_grids

    laplace_cell("a", 0, -3.0, -1.0, decrement=40.0)
    laplace_cell("b", 0, -8.0, -1.0, mode="network", decrement=2.4)
    table = build(find_cells(laplace_cell.outputs))
    (grid,) = evidence_grids(table)
    assert "Not ranked" not in grid.note and [line.words[0] for line in grid.lines] == ["1", "2"]
    folder = laplace_cell("c", 0, -90.0, -1.0, decrement=45.0, mode="network")
    (folder / "command.txt").write_text("bnn-run data=yacht model=c method=laplace seed=0\n")
    table = build(find_cells(laplace_cell.outputs))
    (grid,) = evidence_grids(table)
    assert [(line.words[0], line.words[2]) for line in grid.lines] == [("1", "a"), ("2", "b"), ("—", "c")]
    assert "by more than half the distance" in grid.note and "c laplace." in grid.note
    assert "bnn-run data=yacht model=c method=laplace seed=0 method.mode=tangent" in grid.note
    assert [line.words[3] for line in grid.lines] == ["laplace", "laplace [a]", "laplace [a]"]
    folder = laplace_cell("d", 0, -500.0, -1.0)
    facts = json.loads((folder / "cell.json").read_text())
    facts["report"]["tangent_gap_nats"] = 250.0
    (folder / "cell.json").write_text(json.dumps(facts))
    (grid,) = evidence_grids(build(find_cells(laplace_cell.outputs)))
    assert ("—", "d") in [(line.words[0], line.words[2]) for line in grid.lines], "v* was not reached"
    assert "raise method.tangent_passes" in grid.note


def test_without_evidence_it_says_what_to_run(nine_cells, capsys):
    assert main(["--output-dir", str(nine_cells.outputs), "--evidence"]) == 2
    assert "Laplace" in capsys.readouterr().err
