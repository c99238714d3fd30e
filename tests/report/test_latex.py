"""LaTeX: symbols, names as papers write them, and tables that compile and fit the text of an article."""

import doctest
import re
import shutil
import subprocess
import unicodedata

import pytest

from bnn_runner.report import latex as module
from bnn_runner.report import written_names
from bnn_runner.report.grid import Grid, Line
from bnn_runner.report.latex import PACKAGES, escape_latex, latex
from bnn_runner.report.read_cells import ScoreRow, find_cells
from bnn_runner.report.render import report_of, to_latex
from bnn_runner.report.tables import aggregate, build
from bnn_runner.report.written_names import written

PDFLATEX = shutil.which("pdflatex")
GREEK = [chr(i) for i in range(0x391, 0x3CA) if unicodedata.name(chr(i), "").startswith("GREEK") and i != 0x3C2]


def entry(*values):
    return aggregate([ScoreRow("rmse", v, better="lower") for v in values])


def grid(heads, lines, words=("data", "model", "method", "n"), best=frozenset()):
    numbers = (entry(-1.52, -1.58, -1.55),) * len(heads)
    rows = tuple(Line(line, numbers, 3, best) for line in lines)
    return Grid("regression", words, len(words) - 1, heads, rows, "A note with 50 % of everything.")


HEADS = (
    "marginal_loglik [nats per point] ↑", "joint_loglik tau=10 [nats per block] ↑", "Δ rmse [target units] ↓",
    "dyadic_loglik kappa=2 [nats per block] ↑", "crps [target units] ↓", "ood_auroc (ood/fashion_mnist) [fraction] ↑",
)  # fmt: skip
FEW = [("yacht", "mlp", m, "3") for m in ("map", "laplace_last_layer_kfac")]
MANY = [("yacht", "mlp", f"laplace_last_layer_kfac_{i}", "3") for i in range(12)]
LONG = [(f"set_{i}", "mlp", "laplace", f"hyper.family=groupwise,schedule.epochs=4000,seed={i}", "3") for i in range(2)]
GRIDS = {
    "few lines": grid(HEADS, FEW),
    "many lines": grid(HEADS, MANY, best=frozenset({1, 3})),
    "one line": grid(HEADS, FEW[:1]),
    "long settings": grid(HEADS[:3], LONG, ("data", "model", "method", "settings", "n")),
    "small": grid(HEADS[:2], [("yacht", "mlp", "map", "3"), ("boston", "mlp", "map", "3")]),
}


def test_heads_are_written_as_in_a_paper():
    assert [written(head).line for head in HEADS] == [
        "Marginal LL [nats per point] ↑",
        "Joint LL (τ = 10) [nats per block] ↑",
        "Δ RMSE [target units] ↓",
        "Dyadic LL (κ = 2) [nats per block] ↑",
        "CRPS [target units] ↓",
        "AUROC (fashion_mnist) [fraction] ↑",
    ]
    assert written("rank of marginal_loglik ↓").line == "Rank of Marginal LL ↓"
    assert written("my_own_score").line == "My own score"
    assert doctest.testmod(written_names).attempted > 0 == doctest.testmod(written_names).failed


def test_every_symbol_has_a_command():
    r"""Planted bugs: Δ left as it is, which pdflatex refuses; a backslash that is escaped twice."""
    assert escape_latex("a\\b_c") == r"a\textbackslash{}b\_c"
    assert escape_latex("Δκτλσ ↑±†") == r"$\Delta$$\kappa$$\tau$$\lambda$$\sigma$ $\uparrow$$\pm$$^\dagger$"
    assert escape_latex("Müller 中") == "Müller [U+4E2D]"
    assert all(ord(c) < 128 for c in escape_latex("".join([*GREEK, *module._SYMBOLS])))


def test_wide_tables_are_pivoted_or_split():
    """Planted bugs: a table of one block that is wider than the page; a column that is lost between two blocks."""
    few, many = latex(GRIDS["few lines"]), latex(GRIDS["many lines"])
    assert few.count(r"\begin{tabular}") == 1 and "Joint LL ($\\tau$ = 10) [nats/block] $\\uparrow$ & " in few
    assert " & map & layer\\_kfac \\\\" in few
    assert many.count(r"\begin{tabular}") >= 2 and many.count("Joint LL") == many.count("CRPS") == 1
    assert many.replace("\\allowbreak{}", "").count("last\\_layer") == 12 * many.count(r"\begin{tabular}")
    assert "data yacht, model mlp" in few.splitlines()[0] and "n 3" in few.splitlines()[0]
    assert many.count(r"\textbf{$-$1.550 $\pm$ 0.017}") == 24


def test_a_report_has_its_form(write_cell):
    for seed in range(2):
        config = {"prior.kind_%": "a_b & 50% #1 {x} ~^\\"} if seed else {}
        write_cell("laplace_kfac", 0, [("ood_auroc", -0.5)], config=config, hash8=f"{seed}000abcd")
    body = [line for line in to_latex(report_of(build(find_cells(write_cell.outputs)))).splitlines() if line[:1] != "%"]
    assert [line for line in body if line.endswith("rule")] == ["\\toprule", "\\midrule", "\\bottomrule"]
    text = "\n".join(body).replace("\\allowbreak{}", "")
    assert "a\\_b \\& 50\\% \\#1 \\{x\\} \\textasciitilde{}\\textasciicircum{}\\textbackslash{}" in text
    assert "$-$0.5000" in text and text.count("{") == text.count("}")


@pytest.mark.skipif(PDFLATEX is None, reason="no pdflatex on the path")
def test_tables_compile_and_fit_the_page(tmp_path):
    """Planted bugs: a symbol that pdflatex refuses; a table wider than the text (an overfull box in the log)."""
    packages = "".join(f"\\usepackage{{{name}}}" for name in PACKAGES)
    symbols = escape_latex(" ".join([*GREEK, *module._SYMBOLS, "é", "ß", "中"]))
    tables = "\n\n".join(f"\\noindent {latex(one)}\n" for one in GRIDS.values())
    text = f"\\documentclass{{article}}{packages}\\begin{{document}}\n{tables}\n\n{symbols}\n\\end{{document}}\n"
    (tmp_path / "tables.tex").write_text(text, encoding="utf-8")
    command = [PDFLATEX, "-interaction=nonstopmode", "-halt-on-error", "tables.tex"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, errors="replace", timeout=120)
    assert done.returncode == 0, done.stdout[-2000:]
    assert not re.findall(r"Overfull \\hbox.*", done.stdout), re.findall(r"Overfull \\hbox.*", done.stdout)
