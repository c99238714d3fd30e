"""A user's own table and arrays: what is taken, how it is treated and said, and what is refused, by line and column."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest
import torch

from bnn_runner.data.user_arrays import OwnArrays
from bnn_runner.data.user_table import OwnTable
from bnn_runner.errors import UserError
from bnn_runner.runs.new_points import read_points

PARTS = {"test_fraction": 0.2, "val_fraction": 0.1, "train_size": None, "test_size": None}
N = 60
RANDOM = np.random.default_rng(0)
A, B = RANDOM.normal(size=N).round(3), RANDOM.normal(size=N).round(3)
PRICE = (A - 2 * B + 5).round(3)


def table(path: Path, **changes) -> OwnTable:
    fields = {"target": None, "task": "auto", "columns": None, "drop": (), "missing": "error"}
    fields |= {"keep": (), "header": "auto", "decimal": "auto", "thousands": "auto", "encoding": None}
    fields |= {"skip_rows": None, "comment": None, "missing_codes": None}
    return OwnTable(path=path, **(fields | PARTS | changes))


def written(path: Path, columns: dict, header=True, separator=",", encoding="utf-8", line: str = "") -> Path:
    """A table in a file; `line` is put in place of line 5."""
    rows = [separator.join(map(str, row)) for row in zip(*columns.values(), strict=True)]
    lines = [separator.join(columns), *rows] if header else rows
    if line:
        lines[4] = line
    path.write_bytes("\n".join(lines).encode(encoding))
    return path


def plain(**more) -> dict:
    return {"a": A, "b": B, **more, "price": PRICE}


def labelled(labels) -> dict:
    return {"a": A, "b": B, "kind": [labels[i % len(labels)] for i in range(N)]}


def commas(values) -> list[str]:
    return [f"{v}".replace(".", ",") for v in values]


# What is in the file, fields, then: kind, inputs, outputs, and a text among the notes.
TAKEN = {
    "header": ((plain(), {}), {}, "regression", 2, 1, "the last column, price"),
    "no header": ((plain(), {"header": False}), {}, "regression", 2, 1, "column 3"),
    "target by name": ((plain(), {}), {"target": "a"}, "regression", 2, 1, "target a is read as a number"),
    "target by place": ((plain(), {"header": False}), {"target": 1}, "regression", 2, 1, "target column 1"),
    "several targets": ((plain(), {}), {"target": ("a", "price")}, "regression", 1, 2, "target a, price"),
    "semicolons": ((plain(), {"separator": ";"}), {}, "regression", 2, 1, "price"),
    "tabs": ((plain(), {"separator": "\t"}), {}, "regression", 2, 1, "price"),
    "decimal commas": (
        ({k: commas(v) for k, v in plain().items()}, {"separator": ";"}),
        {},
        "regression",
        2,
        1,
        "price",
    ),
    "byte-order mark": ((plain(), {"encoding": "utf-8-sig"}), {"columns": ("a",)}, "regression", 1, 1, "price"),
    "missing, drop": ((plain(), {"line": "1,,2"}), {"missing": "drop"}, "regression", 2, 1, "1 of 60 rows left out"),
    "question mark, mean": ((plain(), {"line": "?,1,2"}), {"missing": "mean"}, "regression", 2, 1, "1 missing cells"),
    "no target, mean": ((plain(), {"line": "1,1,"}), {"missing": "mean"}, "regression", 2, 1, "1 of 60 rows left out"),
    "texts": (
        (plain(colour=["red", "blue", "green"] * 20), {}),
        {},
        "regression",
        5,
        1,
        "colour is text: one input for each of blue, green, red",
    ),
    "texts, dropped": ((plain(colour=["red"] * N), {}), {"drop": ("colour",)}, "regression", 2, 1, "price"),
    "dates, dropped": ((plain(day=["2020-01-02"] * N), {}), {"drop": ("day",)}, "regression", 2, 1, "price"),
    "constant column": ((plain(c=[0.1] * N), {}), {}, "regression", 3, 1, "check these columns: constant: c"),
    "row numbers": (
        ({"": range(N), **plain()}, {}),
        {},
        "regression",
        2,
        1,
        "left out: a column without a name (counts the rows)",
    ),
    "labels 1, 2, 3": ((labelled([1, 2, 3]), {}), {}, "classification", 2, 3, "1 is class 0, 2 is class 1"),
    "labels -1, 1": ((labelled(["-1", "1.0"]), {}), {}, "classification", 2, 2, "-1 is class 0, 1 is class 1"),
    "text labels": ((labelled(["no", "yes"]), {}), {}, "classification", 2, 2, "no is class 0, yes is class 1"),
    "whole numbers as numbers": ((labelled([1, 2, 3]), {}), {"task": "regression"}, "regression", 2, 1, "last column"),
    "many whole numbers": (({"a": A, "n": range(N)}, {}), {}, "regression", 1, 1, "read as a number"),
}


@pytest.mark.parametrize("case", TAKEN)
def test_what_is_taken(case, tmp_path):
    (columns, way), fields, kind, inputs, outputs, note = TAKEN[case]
    data = table(written(tmp_path / "mine.csv", columns, **way), **fields)
    task = data.load(Path("/nonexistent"), 0)
    assert task.spec == data.spec()
    assert (task.spec.kind, task.spec.input_shape, task.spec.num_outputs) == (kind, (inputs,), outputs)
    assert any(note in text for text in task.notes), task.notes
    rows = len(task.train) + len(task.val) + len(task.test)
    assert rows == N - any("rows left out" in text for text in task.notes)
    for split in (task.train, task.val, task.test):
        assert torch.isfinite(split.inputs).all() and torch.isfinite(split.targets.double()).all()


# What is in the file, fields, and what the refusal says.
REFUSED = {
    "missing cell": ((plain(), {"line": "1,,2"}), {}, "line 5, column b.*data.missing=drop"),
    "question mark": ((plain(), {"line": "?,1,2"}), {}, "line 5, column a.*data.missing"),
    "text among numbers": ((plain(), {"line": "1,x1,2"}), {}, "line 5, column b: 'x1' must be a number.*data.drop=.b."),
    "infinite": ((plain(), {"line": "1,inf,2"}), {}, "line 5, column b: 'inf' must be a number"),
    "text among targets": ((plain(), {"line": "1,1,dear"}), {}, "line 5, column price.*'dear'.*classification"),
    "dates": ((plain(day=["2020-01-02"] * N), {}), {}, "line 2, column day: '2020-01-02' is a date.*data.drop=.day."),
    "names": (
        (plain(who=[f"p{i}" for i in range(N)]), {}),
        {},
        "column who.*at most 20 different values, got 60.*data.drop=.who.",
    ),
    "quoted commas": (
        (plain(w=[f'"{v},5"' for v in range(N)]), {}),
        {},
        "has two decimal marks: .*'0,5' .line 2, column w",
    ),
    "constant target": (({"a": A, "y": [5.5] * N}, {}), {}, "target y of csv must vary"),
    "one label": (({"a": A, "y": ["no"] * N}, {}), {}, "column y must have at least 2 different labels; got only no"),
    "labels as many as rows": (
        ({"a": A, "y": [f"{v:.5f}" for v in np.arange(N) + 0.5]}, {}),
        {"task": "classification"},
        "too many labels for classes.*regression",
    ),
    "two label columns": ((plain(), {}), {"target": ("a", "b"), "task": "classification"}, "requires a single target"),
    "unknown column": (
        (plain(), {}),
        {"target": "prise"},
        "data.target must be a column.*got prise.*Did you mean price",
    ),
    "target as input": ((plain(), {}), {"columns": ("a", "price")}, "must not contain the target price"),
    "nothing left": ((plain(), {}), {"drop": ("a", "b")}, "must have an input left"),
    "short row": ((plain(), {"line": "1,2"}), {}, "line 5 must have 3 cells.*got 2"),
    "empty column": ((plain(e=[""] * N), {}), {"missing": "mean"}, "column e: no cell has a value"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_refused_names_the_place(case, tmp_path):
    (columns, way), fields, message = REFUSED[case]
    data = table(written(tmp_path / "mine.csv", columns, **way), **fields)
    with pytest.raises(UserError, match=f"(?s){message}") as caught:
        data.load(Path("/nonexistent"), 0)
    assert "mine.csv" in str(caught.value) or "csv" in str(caught.value) or "data." in str(caught.value)


def test_a_file_is_needed_and_named(tmp_path):
    with pytest.raises(UserError, match=r"requires a file: data.path=mine.csv data.target=price"):
        table(None).spec()
    with pytest.raises(UserError, match=r"Could not read data.path=.*nowhere.csv"):
        table(tmp_path / "nowhere.csv").spec()
    with pytest.raises(UserError, match=r"requires a file: data.path=mine.npz"):
        arrays(None).spec()


def test_missing_cells_are_filled_by_the_mean_of_the_training_part_alone(tmp_path):
    path = written(tmp_path / "mine.csv", plain(), line="?,1,2")
    task = table(path, missing="mean").load(Path(), 0)
    a = torch.tensor(A).double()
    a[3] = float("nan")
    mean = a[task.train.ids].nanmean()
    [found] = [s.inputs[s.ids == 3] for s in (task.train, task.val, task.test) if (s.ids == 3).any()]
    torch.testing.assert_close(found[0, 0] * task.input_scale[0] + task.input_mean[0], mean.float())


def test_a_column_constant_in_the_training_part_alone_is_named(tmp_path):
    first = table(written(tmp_path / "mine.csv", plain())).load(Path(), 0)
    rare = np.full(N, 0.1)
    rare[first.test.ids] = 0.3
    task = table(written(tmp_path / "mine.csv", plain(rare=rare))).load(Path(), 0)
    assert torch.equal(task.test.ids, first.test.ids)
    assert any("rare of csv is constant in the training part" in note for note in task.notes)
    assert task.input_scale[2] == 1 and torch.isfinite(task.test.inputs).all()


def test_classes_that_a_part_lacks_are_reported(tmp_path):
    labels = ["x"] * 30 + ["y"] * 29 + ["z"]
    path = written(tmp_path / "mine.csv", {"a": A, "kind": labels})
    with_all = table(path, train_size=40).load(Path(), 0)
    lacking = [table(path, train_size=6).load(Path(), seed) for seed in range(3)]
    assert all("class z has no training points" in " ".join(task.notes) for task in lacking)
    assert with_all.class_names == ("x", "y", "z")
    with pytest.raises(UserError, match="must have at least 2 classes; all 1 have the label"):
        table(path, train_size=1).load(Path(), 0)


def test_new_points_go_the_way_of_the_run_s_own(tmp_path):
    columns = plain(colour=["red", "blue", "green"] * 20)
    task = table(written(tmp_path / "mine.csv", columns)).load(Path(), 0)
    del columns["price"]
    new = read_points(written(tmp_path / "new.csv", {k: columns[k] for k in ("colour", "b", "a")}), task)
    order = task.train.ids
    assert torch.equal(new.points.inputs[order], task.train.inputs)


def test_the_content_of_the_file_enters_the_fingerprint_and_its_place_does_not(tmp_path):
    path = written(tmp_path / "mine.csv", plain())
    before = table(path).load(Path(), 0)
    (tmp_path / "deep").mkdir()
    assert table(written(tmp_path / "deep" / "x.csv", plain())).load(Path(), 0).fingerprint == before.fingerprint
    # A row of the test part alone: what is scored has changed, so the run is another.
    columns = {k: np.array(v) for k, v in plain().items()}
    columns["price"][before.test.ids[0]] += 1
    after = table(written(path, columns)).load(Path(), 0)
    assert torch.equal(after.train.targets, before.train.targets)
    assert after.fingerprint != before.fingerprint


def test_reading_writes_nothing_next_to_the_file(tmp_path):
    path = written(tmp_path / "mine.csv", plain())
    path.chmod(0o444)
    tmp_path.chmod(0o555)
    before = {p: p.stat().st_mtime_ns for p in (tmp_path, path)}
    try:
        table(path).load(tmp_path, 0)
    finally:
        tmp_path.chmod(0o755)
    assert os.listdir(tmp_path) == ["mine.csv"] and {p: p.stat().st_mtime_ns for p in before} == before


# -------------------------------------------------------------------------------------- arrays


def arrays(path: Path | None, **changes) -> OwnArrays:
    return OwnArrays(path=path, **({"task": "auto"} | PARTS | changes))


X = RANDOM.normal(size=(N, 3))
IMAGES = RANDOM.integers(0, 256, size=(N, 8, 8, 3)).astype(np.uint8)
CLASSES = np.arange(N) % 3
HALVES = {"x_train": X[:40], "y_train": CLASSES[:40] + 1, "x_test": X[40:], "y_test": CLASSES[40:] + 1}

# Arrays, then: kind, input shape, outputs, type of what is stored.
UNDERSTOOD = {
    "vectors, numbers": ({"x": X, "y": X[:, 0]}, "regression", (3,), 1, torch.float32),
    "one feature": ({"x": X[:, 0], "y": X[:, 1]}, "regression", (1,), 1, torch.float32),
    "two targets": ({"x": X, "y": X[:, :2]}, "regression", (3,), 2, torch.float32),
    "labels": ({"x": X, "y": CLASSES}, "classification", (3,), 3, torch.float32),
    "a column of labels": ({"x": X, "y": CLASSES[:, None]}, "classification", (3,), 3, torch.float32),
    "texts": ({"x": X, "y": np.array(["u", "v", "w"])[CLASSES]}, "classification", (3,), 3, torch.float32),
    "halves": (HALVES, "classification", (3,), 3, torch.float32),
    "colour bytes": ({"x": IMAGES, "y": CLASSES}, "classification", (3, 8, 8), 3, torch.uint8),
    "channels first": ({"x": np.moveaxis(IMAGES, 3, 1), "y": CLASSES}, "classification", (3, 8, 8), 3, torch.uint8),
    "grey bytes": ({"x": IMAGES[..., 0], "y": CLASSES}, "classification", (1, 8, 8), 3, torch.uint8),
    "grey numbers": ({"x": IMAGES[..., 0] / 255, "y": X[:, 0]}, "regression", (1, 8, 8), 1, torch.float32),
}


@pytest.mark.parametrize("case", UNDERSTOOD)
def test_what_arrays_are_understood(case, tmp_path):
    made, kind, shape, outputs, stored = UNDERSTOOD[case]
    np.savez(tmp_path / "mine.npz", **made)
    data = arrays(tmp_path / "mine.npz")
    task = data.load(Path("/nonexistent"), 0)
    assert task.spec == data.spec()
    assert (task.spec.kind, task.spec.input_shape, task.spec.num_outputs) == (kind, shape, outputs)
    assert task.train.inputs.dtype == stored
    x, _ = task.train.gather(torch.arange(len(task.train)))
    channels = x.transpose(0, 1).flatten(1)
    assert channels.mean(1).abs().max() < 1e-5 and (channels.std(1, correction=0) - 1).abs().max() < 1e-4
    if case == "halves":
        assert task.test.ids.tolist() == list(range(40, 60)) and task.class_names == ("1", "2", "3")
        assert any("1 is class 0" in note for note in task.notes)
    if case == "colour bytes":
        assert torch.equal(task.test.inputs[0, 2], torch.from_numpy(IMAGES[int(task.test.ids[0]), :, :, 2]))


UNFIT = {
    "neither": ({"x": X}, "must contain either x and y .*got x"),
    "other lengths": ({"x": X, "y": CLASSES[:-1]}, "x and y must have equally many points; got 60 and 59"),
    "not finite": ({"x": np.where(X[7, 1] == X, np.nan, X), "y": CLASSES}, r"x must be finite; got nan at \[7, 1\]"),
    "texts as inputs": ({"x": np.array(["a"] * N), "y": CLASSES}, "x must be an array of numbers; got <U1"),
    "objects": ({"x": X, "y": np.array([{}] * N, dtype=object)}, "Python objects"),
    "five axes": ({"x": np.zeros((N, 1, 1, 1, 1)), "y": CLASSES}, "must be vectors"),
    "no channels": ({"x": np.zeros((N, 8, 8, 8)), "y": CLASSES}, "the channels are ambiguous"),
    "one label": ({"x": X, "y": np.ones(N, int)}, "got only 1"),
    "constant target": ({"x": X, "y": np.ones(N)}, "target of arrays must vary"),
    "another width": ({**HALVES, "x_test": X[40:, :2]}, r"x_test must be \[3\] .*got \[2\]"),
    "other points": ({"x": X, "y": CLASSES, "x_ood_far": X[:, :2]}, r"far must be \[3\] .*got \[2\]"),
    "black": ({"x": np.zeros((N, 8, 8)), "y": CLASSES}, "pixels of the training images must vary"),
}


@pytest.mark.parametrize("case", UNFIT)
def test_what_arrays_are_refused(case, tmp_path):
    made, message = UNFIT[case]
    np.savez(tmp_path / "mine.npz", **made)
    with pytest.raises(UserError, match=f"(?s){message}"):
        arrays(tmp_path / "mine.npz").load(Path(), 0)


def test_files_that_are_not_archives_are_refused(tmp_path):
    (tmp_path / "text.npz").write_text("x,y")
    np.save(tmp_path / "bare.npy", X)
    for name, message in (("text.npz", "npz file"), ("bare.npy", "must contain named arrays")):
        with pytest.raises(UserError, match=message):
            arrays(tmp_path / name).spec()


def test_other_points_become_sets_of_their_names(tmp_path):
    np.savez(tmp_path / "mine.npz", x=IMAGES, y=CLASSES, x_ood_noise=IMAGES[:9], names=CLASSES)
    task = arrays(tmp_path / "mine.npz").load(Path(), 0)
    assert len(task.ood["noise"]) == 9 and task.ood["noise"].targets is None
    assert any("not used: names" in note for note in task.notes)
