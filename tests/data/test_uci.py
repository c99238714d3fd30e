"""The UCI regression sets: splits from their rules, index files, checksums, and errors for missing files."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

import numpy as np
import pytest
import torch

from bnn_runner.data.uci import SETS, Published, UCIRegression
from bnn_runner.data.uci_splits import gap_test_rows, gap_test_size, standard_test_rows
from bnn_runner.errors import UserError

ALL = {"val_fraction": 0.1, "train_size": None, "test_size": None}
DATA_DIR = os.environ.get("BNN_DATA_DIR")
needs_data = pytest.mark.skipif(DATA_DIR is None, reason="BNN_DATA_DIR is not set")


@pytest.fixture
def tiny_uci(tmp_path, monkeypatch):
    """A data root with a made-up set "tiny": 60 rows, 2 features (the second has two values), no index files."""
    random = np.random.default_rng(0)
    rows = random.normal(size=(60, 4))
    rows[:, 1] = np.arange(60) % 2
    folder = tmp_path / "UCI_Datasets" / "tiny" / "data"
    folder.mkdir(parents=True)
    (folder.parent / "gap").mkdir()
    np.savetxt(folder / "data.txt", rows)
    digest = hashlib.sha256((folder / "data.txt").read_bytes()).hexdigest()
    monkeypatch.setitem(SETS, "tiny", Published("tiny", 60, 2, 3, digest))
    return tmp_path, rows


def tiny(**changes):
    return UCIRegression(**({"name": "tiny", "splits": "standard", "split": 0} | ALL | changes))


def write_index(root: Path, kind: str, train, test, split=0):
    for part, rows in (("train", train), ("test", test)):
        np.savetxt(root / "UCI_Datasets" / "tiny" / kind / f"index_{part}_{split}.txt", np.asarray(rows), fmt="%d")


def test_standard_splits_need_the_table_alone(tiny_uci):
    root, rows = tiny_uci
    task = tiny(split=1).load(root, 0)
    random = np.random.RandomState(1)
    random.permutation(60)
    expected = random.permutation(60)[54:]
    assert task.test.ids.tolist() == sorted(expected.tolist())
    y = task.target_mean + task.target_scale * task.test.targets
    torch.testing.assert_close(y[:, 0], torch.from_numpy(rows[np.sort(expected), 2]).float())
    assert "no index files" in task.notes[0]


def test_without_a_split_the_seed_chooses_it(tiny_uci):
    root, _ = tiny_uci
    for seed in (1, 4):
        assert torch.equal(tiny(split=None).load(root, seed).test.ids, tiny(split=1).load(root, 0).test.ids)


def test_index_files_are_compared_and_win(tiny_uci):
    root, _ = tiny_uci
    test = standard_test_rows(60, 0)
    alone = tiny().load(root, 0)
    write_index(root, "data", np.setdiff1d(np.arange(60), test)[::-1], test)
    equal = tiny().load(root, 0)
    assert "equal to the index files" in equal.notes[0]
    assert equal.fingerprint == alone.fingerprint and torch.equal(equal.test.ids, alone.test.ids)
    write_index(root, "data", range(6, 60), range(6))
    differing = tiny().load(root, 0)
    assert "differ" in differing.notes[0] and differing.test.ids.tolist() == list(range(6))
    write_index(root, "data", range(5, 60), range(6))
    with pytest.raises(UserError, match="must name each row"):
        tiny().load(root, 0)


def test_gap_splits_hold_out_the_middle(tiny_uci):
    root, rows = tiny_uci
    task = tiny(splits="gap").load(root, 0)
    held_out = rows[task.test.ids.numpy(), 0]
    rest = rows[torch.cat([task.train.ids, task.val.ids]).numpy(), 0]
    assert len(held_out) == 20
    assert (rest < held_out.min()).sum() == (rest > held_out.max()).sum() == 20
    assert task.spec.name == "tiny_gap"


def test_a_gap_with_equal_values_at_its_edge_needs_the_index_files(tiny_uci):
    root, _ = tiny_uci
    with pytest.raises(UserError, match=r"index_train_1\.txt.*index_test_1\.txt"):
        tiny(splits="gap", split=1).load(root, 0)
    write_index(root, "gap", range(20, 60), range(20), split=1)
    assert tiny(splits="gap", split=1).load(root, 0).test.ids.tolist() == list(range(20))


def test_a_changed_table_is_refused_with_both_sums(tiny_uci):
    root, _ = tiny_uci
    path = root / "UCI_Datasets" / "tiny" / "data" / "data.txt"
    path.write_bytes(path.read_bytes()[:-10])
    with pytest.raises(UserError) as caught:
        tiny().load(root, 0)
    text = str(caught.value)
    assert str(path) in text and SETS["tiny"].sha256 in text
    assert hashlib.sha256(path.read_bytes()).hexdigest() in text
    assert path.exists()


def test_a_missing_table_is_named_with_its_place(tmp_path):
    with pytest.raises(UserError) as caught:
        tiny(name="yacht").load(tmp_path, 0)
    text = str(caught.value)
    assert str(tmp_path / "UCI_Datasets" / "yacht" / "data") in text and "data.txt" in text
    assert "data_dir=" in text and "BNN_DATA_DIR" in text
    assert list(tmp_path.iterdir()) == []


def test_uci_fields_are_checked_together():
    with pytest.raises(UserError) as caught:
        tiny(name="yoghurt", splits="gaps", val_fraction=-1).spec()
    assert len(caught.value.problems) == 3
    with pytest.raises(UserError) as caught:
        tiny(name="yacht", split=20, test_size=32).spec()
    assert len(caught.value.problems) == 2
    assert tiny(name="yacht", splits="gap", split=5).spec().input_shape == (6,)


def test_reading_writes_nothing(tiny_uci):
    root, _ = tiny_uci
    everything = [root, *root.rglob("*")]
    before = {path: path.stat().st_mtime_ns for path in everything}
    for path in everything:
        path.chmod(0o555 if path.is_dir() else 0o444)
    try:
        tiny().load(root, 0)
    finally:
        for path in everything:
            path.chmod(0o755 if path.is_dir() else 0o644)
    assert {path: path.stat().st_mtime_ns for path in [root, *root.rglob("*")]} == before


# Features whose gap has no equal values at its edges.
KNOWN_GAPS = {
    "boston": [0, 5, 7, 11, 12],
    "energy": [0, 1],
    "kin8nm": [0, 1, 2, 3, 4, 5, 6, 7],
    "naval": [0, 1, 2, 3, 4, 5, 6, 7, 9, 10, 12, 13],
    "protein": [0, 1, 3, 4, 6, 8],
}


@needs_data
@pytest.mark.parametrize("name", [name for name in SETS if name != "tiny"])
def test_the_rules_reproduce_the_published_index_files(name):
    """Every standard split of all nine sets; every gap split that the rule claims to know."""
    folder = Path(DATA_DIR) / "UCI_Datasets" / SETS[name].folder
    if not folder.is_dir():
        pytest.skip(f"{folder} is not there")
    rows = np.loadtxt(folder / "data" / "data.txt")
    assert len(rows) == SETS[name].num_rows
    assert np.loadtxt(folder / "data" / "n_splits.txt") == SETS[name].num_standard
    for split in range(SETS[name].num_standard):
        stored = np.loadtxt(folder / "data" / f"index_test_{split}.txt", dtype=int)
        assert np.array_equal(standard_test_rows(len(rows), split), stored)
        assert len(stored) == SETS[name].num_test("standard")
        rest = np.loadtxt(folder / "data" / f"index_train_{split}.txt", dtype=int)
        assert np.array_equal(np.sort(rest), np.setdiff1d(np.arange(len(rows)), stored))
    known = []
    for split in range(SETS[name].num_features):
        stored = np.loadtxt(folder / "gap" / f"index_test_{split}.txt", dtype=int)
        assert len(stored) == gap_test_size(len(rows))
        made = gap_test_rows(rows[:, split])
        if made is not None:
            known.append(split)
            assert set(made.tolist()) == set(stored.tolist()), split
    assert known == KNOWN_GAPS.get(name, [])


@needs_data
def test_naval_has_two_constant_columns():
    if not (Path(DATA_DIR) / "UCI_Datasets" / SETS["naval"].folder).is_dir():
        pytest.skip("naval is not there")
    task = tiny(name="naval").load(Path(DATA_DIR), 0)
    assert next(note for note in task.notes if "constant" in note).startswith("Input columns 8 (counted from 0), 11 ")
    assert sum("constant" in note for note in task.notes) == 1
    assert task.train.inputs.abs().max() < 50


def test_the_table_of_sets_has_not_been_left_changed():
    assert "tiny" not in SETS and len(SETS) == 9
