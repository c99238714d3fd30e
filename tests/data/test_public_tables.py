"""Tables as people have them: exported by spreadsheets, R, pandas, databases. Each case says what is read or refused.

Every guess (header, separator, marks, what is left out, task) is in the notes, with the first row as read.
"""

from __future__ import annotations

import bz2
import gzip
import io
import lzma
import re
import shlex
import subprocess
import sys
import zipfile
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch

from bnn_runner.config.overrides import parse
from bnn_runner.data.table_file import read_table
from bnn_runner.data.user_table import OwnTable
from bnn_runner.errors import UserError

N = 60
_RANDOM = np.random.default_rng(1)
A = [f"{v:.2f}" for v in _RANDOM.normal(size=N) + 3]
B = [f"{v:.2f}" for v in _RANDOM.normal(size=N) * 20]
C = [f"{v:.4f}" for v in _RANDOM.normal(size=N)]
Y = [f"{float(a) * 2 - float(b):.3f}" for a, b in zip(A, B, strict=True)]
PET = ["cat", "dog", "cat", "dog", "dog"] * 12
FIELDS: dict[str, Any] = {"target": None, "task": "auto", "columns": None, "drop": (), "missing": "error"}
FIELDS |= {"keep": (), "header": "auto", "decimal": "auto", "thousands": "auto", "encoding": None}
FIELDS |= {"skip_rows": None, "comment": None, "missing_codes": None}
FIELDS |= {"test_fraction": 0.2, "val_fraction": 0.1, "train_size": None, "test_size": None}


def rows(*columns: Any, separator: str = ",") -> list[str]:
    """Lines of a table from its columns; a single text is repeated."""
    full = [[c] * N if isinstance(c, str) else list(map(str, c)) for c in columns]
    return [separator.join(cells) for cells in zip(*full, strict=True)]


def table(*lines: str | list[str]) -> str:
    return "\n".join(line for part in lines for line in ([part] if isinstance(part, str) else part)) + "\n"


def commas(values: list[str]) -> list[str]:
    return [v.replace(".", ",") for v in values]


PLAIN = table("a,b,y", rows(A, B, Y))
SEMI = rows(commas(A), commas(B), commas(Y), separator=";")


def changed(text: str, line: int, content: str) -> str:
    """The text with another line, counted from 1."""
    lines = text.split("\n")
    lines[line - 1] = content
    return "\n".join(lines)


def inserted(text: str, before: int, content: str) -> str:
    lines = text.split("\n")
    return "\n".join([*lines[: before - 1], content, *lines[before - 1 :]])


@dataclass
class Case:
    """What is in the file, settings, and what is read."""

    content: str | bytes
    notes: str | list[str]
    inputs: tuple[str, ...] = ("a", "b")
    target: str = "y"
    rows: int = N
    classes: tuple[str, ...] = ()
    first: dict[str, float] = field(default_factory=dict)
    fields: dict[str, Any] = field(default_factory=dict)
    name: str = "mine.csv"


def own(folder: Path, case: Case | Refused) -> OwnTable:
    path = folder / case.name
    path.write_bytes(case.content if isinstance(case.content, bytes) else case.content.encode())
    return OwnTable(path=path, **(FIELDS | case.fields))


def zipped(**members: str) -> bytes:
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w") as archive:
        for name, text in members.items():
            archive.writestr(name.replace("_csv", ".csv"), text)
    return out.getvalue()


COUNT = list(map(str, range(N)))
COUNT1 = [str(i + 1) for i in range(N)]
SHUFFLED = list(map(str, np.random.default_rng(2).permutation(N)))
CAT = {"target": "label"}
TWO = ("cat", "dog")
BIG = [f"{1000 + 37 * i:,}" for i in range(N)]  # 1,000 ... 3,183
GERMAN_BIG = [v.replace(",", ".") for v in BIG]
PETS = table("a,b,label", rows(A, B, PET))
SENTINEL = ["-999" if i % 5 == 0 else a for i, a in enumerate(A)]
FILL = ["9.96921e+36" if i % 9 == 0 else a for i, a in enumerate(A)]
SPACED = [f"{v[:-4]}\u00a0{v[-3:]}" for v in BIG]

TAKEN = {
    # headers
    "plain": Case(PLAIN, ["mine.csv: cells separated by commas; header in line 1", f"a = {float(A[0])}", "target y"]),
    "numbered header, text label": Case(
        table("0,1,2,label", rows(A, B, C, PET)),
        "header in line 1 (data.header=false: a row)",
        ("0", "1", "2"),
        "label",
        classes=TWO,
    ),
    "numbered header": Case(table("0,1,2,3", rows(A, B, C, Y)), "header in line 1", ("0", "1", "2"), "3"),
    "numbered header, target by name": Case(
        table("0,1,2,3", rows(A, B, C, Y)), "header", ("0", "1", "2"), "3", fields={"target": 3}
    ),
    "numbered header, target in words": Case(
        table("0,1,2,target", rows(A, B, C, Y)), "header in line 1", ("0", "1", "2"), "target"
    ),
    "header from 1": Case(table("1,2,3", rows(A, B, Y)), "header in line 1", ("1", "2"), "3"),
    "years": Case(
        table("land,1990,1991,1992", rows(PET, A, B, Y)), "header in line 1", ("land", "1990", "1991"), "1992"
    ),
    "words and a year": Case(table("a,2019,y", rows(A, B, Y)), "header in line 1", ("a", "2019"), "y"),
    "wavelengths": Case(
        table("1100.5,1102.5,1104.5,label", rows(A, B, C, PET)),
        "header",
        ("1100.5", "1102.5", "1104.5"),
        "label",
        classes=TWO,
    ),
    "no header, numbers": Case(
        table(rows(A, B, Y)), "no header: line 1 is a row", ("column 1", "column 2"), "column 3"
    ),
    "no header, label": Case(table(rows(A, B, PET)), "no header", ("column 1", "column 2"), "column 3", classes=TWO),
    "no header, all text": Case(
        table(rows(["x", "s", "x", "f", "s"] * 12, ["n", "y", "w"] * 20, PET)),
        "no header: line 1 is a row (data.header=true: the header)",
        ("column 1", "column 2"),
        "column 3",
        classes=TWO,
    ),
    "header, all text": Case(
        table("shape,colour,label", rows(["x", "s"] * 30, ["n", "y", "w"] * 20, PET)),
        "header in line 1",
        ("shape", "colour"),
        "label",
        classes=TWO,
    ),
    "a header that is denied": Case(
        table("shape,colour,label", rows(["x", "s"] * 30, ["n", "y", "w"] * 20, PET)),
        "column 1 is text: one input for each of s, shape, x",
        ("column 1", "column 2"),
        "column 3",
        rows=N + 1,
        classes=("cat", "dog", "label"),
        fields={"header": False},
    ),
    "counting rows are no header": Case(
        table([f"{i},{i + 1},{i + 2},{i + 3}" for i in _RANDOM.permutation(N)]),
        "no header",
        ("column 1", "column 2", "column 3"),
        "column 4",
    ),
    "data of NumPy": Case(table("# a b y", rows(A, B, Y, separator=" ")), "header in the comment above the first row"),
    "a column called #": Case(
        table("#,Name,a,b,label", [f"{i},p{i},{a},{b},{p}" for i, a, b, p in zip(COUNT1, A, B, PET, strict=True)]),
        "left out: # (counts the rows)",
        target="label",
        classes=TWO,
        fields={"drop": ("Name",)},
    ),
    # columns that number the rows
    "index without a name": Case(
        table(",0,1,2,3", rows(COUNT, A, B, C, Y)),
        "left out: a column without a name (counts the rows)",
        ("0", "1", "2"),
        "3",
    ),
    "a series with its index": Case(table(",a,y", rows(COUNT, A, Y)), "(counts the rows)", ("a",)),
    "Unnamed: 0": Case(
        table("Unnamed: 0,a,b,label", rows(COUNT, A, B, sorted(PET))),
        ["left out: Unnamed: 0 (counts the rows)", "unless you add 'data.keep=[\"Unnamed: 0\"]'"],
        target="label",
        classes=TWO,
    ),
    "id from 1": Case(table("id,a,b,y", rows(COUNT1, A, B, Y)), "left out: id (counts the rows)"),
    "id from 1000 in decimals": Case(
        table("nr,a,b,y", rows([f"{1000 + i}.0" for i in range(N)], A, B, Y)), "left out: nr (counts the rows)"
    ),
    "shuffled PassengerId": Case(
        table("PassengerId,a,b,y", rows(SHUFFLED, A, B, Y)), "left out: PassengerId (a different value in every row)"
    ),
    "names as index": Case(
        table('"","a","b","y"', rows([f'"car {i}"' for i in SHUFFLED], A, B, Y)),
        "left out: a column without a name (a different value in every row)",
    ),
    "row names of R": Case(
        table('"a" "b" "y"', rows([f'"{i}"' for i in COUNT1], A, B, Y, separator=" ")),
        ["the header has one name less", "(counts the rows)"],
    ),
    "an index that is wanted": Case(
        table("t,a,y", rows(COUNT, A, Y)), "first row (line 2): t = 0", ("t", "a"), fields={"keep": ("t",)}
    ),
    "an index among the columns": Case(
        table("t,a,y", rows(COUNT, A, Y)), "target y", ("t",), fields={"columns": ("t",)}
    ),
    "nothing but an index": Case(table("t,y", rows(COUNT, Y)), "input: t, although it counts the rows", ("t",)),
    # decimal and thousands marks
    "semicolons": Case(
        table("a;b;y", SEMI), ["separated by semicolons", "decimal comma, as in"], first={"a": float(A[0])}
    ),
    "tabs and decimal commas": Case(
        table("a\tb\ty", rows(commas(A), commas(B), commas(Y), separator="\t")),
        ["separated by tabs", "decimal comma"],
        first={"b": float(B[0])},
    ),
    "quoted decimal commas": Case(
        table("a,b,y", rows(*[[f'"{v}"' for v in commas(x)] for x in (A, B, Y)])),
        "decimal comma",
        first={"a": float(A[0])},
    ),
    "German thousands": Case(
        table("a;b;y", rows([f"{v},50" for v in GERMAN_BIG], commas(B), commas(Y), separator=";")),
        ["decimal comma", "point between thousands, as in '1.000,50'"],
        first={"a": 1000.5},
    ),
    "American thousands": Case(
        table("a,b,y", rows([f'"{v}.50"' for v in BIG], B, Y)), "comma between thousands", first={"a": 1000.5}
    ),
    "millions": Case(
        table("a,b,y", rows([f'"{1001000 + i:,}"' for i in range(N)], B, Y)),
        "comma between thousands",
        first={"a": 1001000.0},
    ),
    "Swiss thousands": Case(
        table("a;b;y", rows([v.replace(",", "'") for v in BIG], B, Y, separator=";")),
        "apostrophe between thousands",
        first={"a": 1000.0},
    ),
    "thousands by spaces": Case(
        table("a;b;y", rows(SPACED, commas(B), commas(Y), separator=";")),
        "space between thousands",
        first={"a": 1000.0},
    ),
    "thousands as said": Case(
        table("a\tb\ty", rows(BIG, B, Y, separator="\t")),
        "comma between thousands",
        first={"a": 1000.0},
        fields={"thousands": "comma"},
    ),
    "thousands as said by the mark": Case(
        table("a\tb\ty", rows(BIG, B, Y, separator="\t")),
        "comma between thousands",
        first={"a": 1000.0},
        fields={"thousands": ","},
    ),
    "decimals as said": Case(
        table("a\tb\ty", rows(BIG, COUNT, commas(Y), separator="\t")),
        "decimal comma",
        ("a",),
        first={"a": 1.0},
        fields={"decimal": "comma"},
    ),
    "marks in a column that is left out": Case(
        table("w;a;b;y", rows(BIG, A, B, Y, separator=";")), "separated by semicolons", fields={"drop": ("w",)}
    ),
    "a minus sign of typesetting": Case(
        table("a,b,y", rows(A, [b.replace("-", "\u2212") for b in B], Y)), "target y", first={"b": float(B[0])}
    ),
    # other rows and lines
    "a title": Case("Results of 2020\n" + PLAIN, "line 1 left out as a title (data.skip_rows=0 reads all)"),
    "titles of a spreadsheet": Case("Results,,\n,,\nDraft,,\n" + PLAIN, "lines 1 and 3 left out as a title"),
    "pairs above the header": Case(
        "station,Berlin\nowner,me\n" + table("a,b,c,d,y", rows(A, B, C, A, Y)),
        "lines 1 and 2 left out as a title",
        ("a", "b", "c", "d"),
    ),
    "skip_rows": Case("x,y,z\n1,2,3\n" + PLAIN, "header in line 3", fields={"skip_rows": 2}),
    "one line to skip": Case(inserted(PLAIN, 5, "a note, here"), "target y", fields={"skip_rows": (5,)}),
    "units": Case(inserted(PLAIN, 2, "m,kg,EUR"), "the row m, kg, EUR below the header left out as units"),
    "comments": Case("# made by me\n" + inserted(PLAIN, 9, "# checked"), "lines 1 and 10 left out as comments"),
    "percent comments": Case("% made by me\n" + PLAIN, "line 1 left out as comments"),
    "comments as said": Case("// made by me, today\n" + PLAIN, "line 1 left out", fields={"comment": "//"}),
    "footnotes": Case(PLAIN + ",,\nSource: me,,\n", "line 63 left out as footnotes"),
    "two files in one": Case(PLAIN + PLAIN, "line 62 left out as footnotes or repeated headers", rows=2 * N),
    "sep=": Case("sep=;\n" + table("a;b;y", SEMI), "separated by semicolons, as its first line states"),
    "blank columns at the end": Case(
        table("a;b;y;;;", [f"{row};;;" for row in SEMI]), "left out: a column without a name (no cell has a value)"
    ),
    "blank cells beyond the header": Case(table("a,b,y", [f"{row},," for row in rows(A, B, Y)]), "target y"),
    "blank rows": Case(PLAIN.replace("\n", "\n,,\n"), "target y"),
    "bars": Case(table("a|b|y", rows(A, B, Y, separator="|")), "separated by bars"),
    "white space": Case(
        table([f"  {a}   {b} {y}" for a, b, y in zip(A, B, Y, strict=True)]),
        "separated by white space",
        ("column 1", "column 2"),
        "column 3",
    ),
    "Windows lines": Case(PLAIN.replace("\n", "\r\n"), "target y"),
    "old Macintosh lines": Case(PLAIN.replace("\n", "\r"), "target y"),
    "quoted line breaks": Case(table('"a\nlong name",b,y', rows(A, B, Y)), "header in line 1", ("a\nlong name", "b")),
    # encodings, packed files
    "UTF-8 with a mark": Case(PLAIN.encode("utf-8-sig"), "header in line 1"),
    "UTF-16": Case(PLAIN.encode("utf-16"), "encoding UTF-16"),
    "UTF-16 without a mark": Case(PLAIN.encode("utf-16-le"), "encoding UTF-16-LE"),
    "cp1252": Case(
        table("größe,b,y", rows(A, B, Y)).encode("cp1252"),
        "encoding cp1252, as it is not UTF-8: 'größe'",
        ("größe", "b"),
    ),
    "latin-1 labels": Case(
        table("a,b,label", rows(A, B, ["süß" if p == "cat" else "naß" for p in PET])).encode("latin-1"),
        "encoding cp1252",
        target="label",
        classes=("naß", "süß"),
    ),
    "an encoding as said": Case(
        table("длина,b,y", rows(A, B, Y)).encode("cp1251"),
        "header in line 1",
        ("длина", "b"),
        fields={"encoding": "cp1251"},
    ),
    "gzip": Case(gzip.compress(PLAIN.encode()), "unpacked (gzip)", name="mine.csv.gz"),
    "bzip2": Case(bz2.compress(PLAIN.encode()), "unpacked (bzip2)", name="mine.csv.bz2"),
    "xz": Case(lzma.compress(PLAIN.encode()), "unpacked (xz)", name="mine.csv.xz"),
    "zip": Case(zipped(train_csv=PLAIN), "unpacked (zip)", name="train.csv.zip"),
    # missing values
    "missing codes of R": Case(
        changed(PLAIN, 5, "NA,1.5,2.5"), "1 of 60 rows left out", rows=N - 1, fields={"missing": "drop"}
    ),
    "errors of a spreadsheet": Case(
        changed(PLAIN, 5, "#DIV/0!,1.5,2.5"), "1 of 60 rows left out", rows=N - 1, fields={"missing": "drop"}
    ),
    "missing codes as said": Case(
        table("a,b,y", rows(SENTINEL, B, Y)),
        "12 of 60 rows left out",
        rows=48,
        fields={"missing": "drop", "missing_codes": (-999,)},
    ),
    "missing codes in another spelling": Case(
        table("a,b,y", rows([s.replace("-999", "-999.00") for s in SENTINEL], B, Y)),
        "12 of 60 rows left out",
        rows=48,
        fields={"missing": "drop", "missing_codes": (-999,)},
    ),
    "a class called None": Case(
        table("a,b,label", rows(A, B, ["None" if p == "cat" else p for p in PET])),
        "None is class 0, dog is class 1",
        target="label",
        classes=("None", "dog"),
        fields={"missing": "drop", "missing_codes": ()},
    ),
    "a class called None disappears": Case(
        table("a,b,label", rows(A, B, [("None", "cat", "dog")[i % 3] for i in range(N)])),
        "20 of 60 rows left out: a value is missing. 'data.missing_codes=[]' reads 'None' (20 cells) as text.",
        target="label",
        rows=40,
        classes=TWO,
        fields={"missing": "drop"},
    ),
    # what to look at
    "constant columns": Case(table("a,b,c,d,y", rows(A, B, "1", "x", Y)), "constant: c, d", ("a", "b", "c", "d")),
    "sentinels": Case(
        table("a,b,y", rows(SENTINEL, B, Y)),
        "far from all other values: a has -999 in 12 rows (if missing: 'data.missing_codes=[-999]' data.missing=drop)",
    ),
    "fill values of climate models": Case(table("a,b,y", rows(FILL, B, Y)), "a has 9.96921e+36 in 7 rows"),
    "1e200": Case(changed(PLAIN, 5, "1e200,1.5,2.5"), "a has 1e+200 in 1 row"),
    "all in one note": Case(
        table("id,a,b,c,y", rows(COUNT1, SENTINEL, FILL, "1", Y)),
        [
            "check these columns: left out: id (counts the rows), unless you add 'data.keep=[id]'; "
            "constant: c; far from all other values: a has -999 in 12 rows; b has 9.9",
        ],
        ("a", "b", "c"),
    ),
    # the task
    "few whole numbers": Case(
        table("a,b,y", rows(A, B, [i % 3 for i in range(N)])), "target y is read as 3 classes", classes=("0", "1", "2")
    ),
    "classes as decimals": Case(
        table("a,b,y", rows(A, B, [f"{i % 3}.0" for i in range(N)])), "read as 3 classes", classes=("0", "1", "2")
    ),
    "numbers as said": Case(
        table("a,b,y", rows(A, B, [i % 3 for i in range(N)])), "header", fields={"task": "regression", "target": "y"}
    ),
}


@pytest.mark.parametrize("name", TAKEN)
def test_what_is_read_and_said(name: str, tmp_path: Path) -> None:
    case = TAKEN[name]
    data = own(tmp_path, case)
    task = data.load(Path("/nonexistent"), 0)
    printed = "\n".join(task.notes)
    for note in [case.notes] if isinstance(case.notes, str) else case.notes:
        assert note in printed, printed
    assert "first row (line " in printed
    assert task.feature_names == case.inputs
    assert (task.target_names or (case.target,)) == (case.target,)
    assert task.class_names == case.classes
    assert sum(len(s) for s in (task.train, task.val, task.test)) == case.rows
    assert all(bool(torch.isfinite(s.inputs).all()) for s in (task.train, task.val, task.test))
    for column, value in case.first.items():
        assert f"{column} = {value:.12g}" in printed, printed


@dataclass
class Refused:
    """What is in the file, and the error; `pasted` is what the advice sets, with which the table is read."""

    content: str | bytes
    says: str
    pasted: bool = False
    fields: dict[str, Any] = field(default_factory=dict)
    name: str = "mine.csv"


ODD = table('größe,"when taken",b,y', rows([f"{v}x" for v in A], [f"2020-01-{i % 28 + 1:02}" for i in range(N)], B, Y))
REFUSED = {
    "thousands or decimals": Refused(
        table("a\tb\ty", rows(["48,900", "786"] * 30, A, Y, separator="\t")),
        r"'48,900' \(line 2, column a\) has two readings, 48900 and 48.9. Say which: data.thousands=comma",
        pasted=True,
    ),
    "thousands or decimals, semicolons": Refused(
        table("a;b;y", rows(["48,900", "786"] * 30, A, Y, separator=";")), "two readings, 48900 and 48.9", pasted=True
    ),
    "thousands or decimals, points": Refused(
        table("a;b;y", rows(["48.900", "786"] * 30, commas(A), commas(Y), separator=";")),
        "'48.900' .line 2, column a. has two readings, 48900 and 48.9. Say which: data.thousands=point",
        pasted=True,
    ),
    "two decimal marks": Refused(
        table("a;b;y", rows(commas(A), B, Y, separator=";")),
        "has two decimal marks: .*column y.* and '3,35' .line 2, column a",
    ),
    "missing values, all at once": Refused(
        changed(changed(PLAIN, 5, "NA,1.5,2.5"), 9, "?,,2.5"),
        r"has 3 missing values: 2 cells, the first in line 5, column a \('NA', '\?'\); line 9, column b. .*=drop",
        pasted=True,
    ),
    "a class called None": Refused(
        table("a,b,label", rows(A, B, ["None" if p == "cat" else p for p in PET])),
        r"'data.missing_codes=\[\]' reads 'None' \(24 cells\) as text",
        pasted=True,
    ),
    "unread cells, all at once": Refused(
        changed(changed(PLAIN, 5, "-,1.5,2.5"), 9, "1.5,tba,2.5"),
        r"(?s)line 5, column a: '-' must be a number.*line 9, column b: 'tba'.*'data.drop=\[a,b\]'",
    ),
    "unread cells as codes": Refused(
        changed(changed(PLAIN, 5, "NA,1.5,2.5"), 9, "x,1.5,2.5"),
        r"'data.missing_codes=\[NA,x\]' data.missing=drop",
        pasted=True,
        fields={"missing": "mean"},
    ),
    "names that need quotes": Refused(ODD, r"(?s)größe.*when taken.*data.drop=\[.größe.,.when taken.\]", pasted=True),
    "a name that Hydra would read": Refused(
        table("${x},b,y", rows([f"2020-01-{i % 28 + 1:02}" for i in range(N)], B, Y)), "data.drop=.1.", pasted=True
    ),
    "a name that is a number": Refused(
        table("b,2019,y", rows(B, [f"2020-01-{i % 28 + 1:02}" for i in range(N)], Y)), "data.drop", pasted=True
    ),
    "a name that means null": Refused(
        table("b,null,y", rows(B, [f"2020-01-{i % 28 + 1:02}" for i in range(N)], Y)), "data.drop", pasted=True
    ),
    "what is left out already": Refused(
        ODD, r"data.drop=\[b,.größe.,.when taken.\]", pasted=False, fields={"drop": ("b",)}
    ),
    "currency": Refused(
        table("a,b,y", rows([f"${a}" for a in A], B, Y)), "a currency or percent sign makes a number text", pasted=True
    ),
    "an open quote": Refused(changed(PLAIN, 20, '1.5,"2.5,3.5'), "line 20: a quoted cell reaches to line .*not closed"),
    "an open quote in the last column": Refused(changed(PLAIN, 20, '1.5,2.5,"3.5'), "line 20: a quoted cell"),
    "an open quote of 128 KB": Refused(
        table("a,b,y", rows(A, B, Y), '1.5,"2.5,3.5', ["1.5,2.5,3.5"] * 20000),
        "line 62: .*quote in this line is not closed",
    ),
    "two open quotes": Refused(
        changed(changed(PLAIN, 20, '1.5,2.5,"3.5'), 40, '1.5,2.5,3.5"'), "line 20: a quoted cell reaches to line 40"
    ),
    "rows of other lengths": Refused(
        changed(changed(PLAIN, 20, "1,2"), 30, "1,2,3,4"),
        r"line 20 must have 3 cells, as the header; got 2, and so in 1 more",
    ),
    "equal names": Refused(table("a,a,y", rows(A, B, Y)), "column names must be unique; got 'a' twice"),
    "a huge target": Refused(
        changed(PLAIN, 5, "1.5,2.5,1e200"), "line 5, column y: the target must be below 1e.37", pasted=True
    ),
    "a character that is no mark": Refused(
        PLAIN, "data.decimal must be auto, comma or point; got 'dot'", fields={"decimal": "dot"}
    ),
    "an encoding that is none": Refused(PLAIN, "data.encoding must name an encoding", fields={"encoding": "ansi8"}),
    "another encoding": Refused(PLAIN + "é", "must be text in ascii; byte .*line 62", fields={"encoding": "ascii"}),
    "a web page": Refused("<!DOCTYPE html>\n<html>", "it is a web page. Download the file itself"),
    "a pointer of Git LFS": Refused("version https://git-lfs.github.com/spec/v1\noid 1\n", "git lfs pull"),
    "JSON": Refused('[{"a": 1, "y": 2}]', "it is JSON"),
    "a pickle": Refused(b"\x80\x04\x95abc", "type pickle. Reading it could run code"),
    "an old spreadsheet": Refused(
        b"\xd0\xcf\x11\xe0" + bytes(99), "type xls. Open it in a spreadsheet", name="mine.xls"
    ),
    "arrays": Refused(b"\x93NUMPY\x01", "use data=arrays"),
    "zero bytes": Refused("a,b,y\n1,2,3\n" + "\x00\n" * 3, "line 3 has a zero byte"),
    "a damaged archive": Refused(gzip.compress(PLAIN.encode())[:-20], "Could not unpack .*gzip", name="mine.csv.gz"),
    "an archive of several files": Refused(
        zipped(train_csv=PLAIN, test_csv=PLAIN), "single table; it contains train.csv, test.csv"
    ),
    "an empty file": Refused("", "must have one row per point"),
    "a header alone": Refused("a,b,y\n", "must have one row per point"),
    "another case": Refused(PLAIN, "got Y. Did you mean y", fields={"target": "Y"}),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_refused_says_what_to_type(name: str, tmp_path: Path) -> None:
    case = REFUSED[name]
    with pytest.raises(UserError, match=case.says) as caught:
        own(tmp_path, case).load(Path("/nonexistent"), 0)
    assert "Traceback" not in str(caught.value)
    if case.pasted:
        settings = pasted(str(caught.value))
        assert settings, str(caught.value)
        assert read_with(tmp_path, case, settings)


def pasted(message: str) -> list[list[str]]:
    """The words `data.KEY=...` of a message as a shell and Hydra read them, each group of neighbours by itself."""
    quoted = r"'data\.[a-z_]+=[^']*(?:'\"'\"'[^']*)*'|data\.[a-z_]+=[^\s.;]+(?=[\s.;])"
    groups = re.findall(rf"(?:{quoted})(?: (?:{quoted}))*", message)
    return [shlex.split(group) for group in groups]


def read_with(folder: Path, case: Refused, groups: list[list[str]]) -> bool:
    """Whether the table is read with some advice of the message, as it is pasted."""
    from hydra.core.override_parser.overrides_parser import OverridesParser

    for words in groups:
        settings = {}
        for word in words:
            [override] = OverridesParser.create().parse_overrides([word])
            assert not override.is_sweep_override(), word
            assert override.value() == parse(word).value, word
            value = override.value()
            settings[override.key_or_group.removeprefix("data.")] = tuple(value) if isinstance(value, list) else value
        try:
            own(folder, replace(case, fields=case.fields | settings)).load(Path("/nonexistent"), 0)
        except UserError:
            continue
        return True
    return False


def test_a_shell_reads_the_advice_as_one_word(tmp_path: Path) -> None:
    """Planted bug: a column's name with a space, which the shell splits."""
    with pytest.raises(UserError) as caught:
        own(tmp_path, Refused(ODD, "")).load(Path("/nonexistent"), 0)
    [words] = [w for w in pasted(str(caught.value)) if w[0].startswith("data.drop")]
    found = re.search(r"'data\.drop=.*?\]'", str(caught.value))
    assert found is not None
    out = subprocess.run(["bash", "-c", f"printf '%s\\n' {found[0]}"], capture_output=True, text=True, check=True)
    assert out.stdout.splitlines() == words == ['data.drop=["größe","when taken"]']


@pytest.mark.parametrize("suffix", [".parquet", ".xlsx"])
def test_binary_tables_are_those_of_their_text(suffix: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package, extra = {".parquet": ("pyarrow", "parquet"), ".xlsx": ("openpyxl", "excel")}[suffix]
    magic = {".parquet": b"PAR1....", ".xlsx": zipped(**{"xl/workbook.xml": ""})}[suffix]
    (tmp_path / f"closed{suffix}").write_bytes(magic)
    with monkeypatch.context() as without:
        without.setitem(sys.modules, package, None)
        with pytest.raises(
            UserError, match=rf"requires {package}. Install it with pip install 'bnn-runner\[{extra}\]'"
        ):
            read_table(tmp_path / f"closed{suffix}")
    pytest.importorskip(package)
    with pytest.raises(UserError, match=f"Could not read .*closed{suffix}"):
        read_table(tmp_path / f"closed{suffix}")
    frame = pd.DataFrame({"id": range(N), "a": list(map(float, A)), "pet": PET, "y": list(map(float, Y))})
    frame.loc[4, "a"] = np.nan
    path = tmp_path / f"mine{suffix}"
    if suffix == ".parquet":
        frame.to_parquet(path)
    else:
        with pd.ExcelWriter(path) as book:
            frame.to_excel(book, sheet_name="points", index=False, startrow=2)
            frame.to_excel(book, sheet_name="more", index=False)
            book.sheets["points"].cell(1, 1, "Results of 2020")
    task = own(tmp_path, Case(path.read_bytes(), "", name=path.name, fields={"missing": "drop"})).load(Path(), 0)
    frame.to_csv(tmp_path / "same.csv", index=False)
    same = own(tmp_path, Case((tmp_path / "same.csv").read_text(), "", fields={"missing": "drop"})).load(Path(), 0)
    assert task.feature_names == ("a", "pet") and torch.equal(task.train.inputs, same.train.inputs)
    printed = "\n".join(task.notes)
    assert "left out: id (counts the rows)" in printed and "1 of 60 rows left out" in printed
    assert suffix == ".parquet" or "sheet 'points'; not read: more; row 1 left out as a title" in printed


def test_cells_keep_their_line_numbers(tmp_path: Path) -> None:
    path = tmp_path / "mine.csv"
    path.write_text('# note\nsep=;\n"a\nb";y\n1;2\n\n3;4\n')
    found = read_table(path)
    assert (found.header, found.rows, found.lines) == (("a\nb", "y"), (("1", "2"), ("3", "4")), (5, 7))


def test_the_number_of_cases() -> None:
    assert len(TAKEN) + len(REFUSED) >= 80
