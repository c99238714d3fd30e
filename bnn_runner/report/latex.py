r"""A table as LaTeX that fits the text of an article: split into blocks of columns, or with its metrics as rows."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Sequence

from bnn_runner.report.grid import Grid, Line
from bnn_runner.report.written_names import WrittenHead, written

TEXT_WIDTH = 345.0
"""Points (TeX): the width of the text of LaTeX's `article` at 10 points."""
PACKAGES = ("booktabs", "array")
_LETTER, _BOLD, _GAP = 4.6, 1.12, 8.0
"""Points of a letter in \\small, the factor of bold type, and the space between two columns."""
_WIDEST_LABEL = 110.0
_MOST_ROWS_AS_COLUMNS = 5
_LETTERS_OF_A_NAME = 14
_SYMBOLS = {
    "\\": r"\textbackslash{}", "&": r"\&", "%": r"\%", "$": r"\$", "#": r"\#", "_": r"\_", "{": r"\{", "}": r"\}",
    "~": r"\textasciitilde{}", "^": r"\textasciicircum{}", "<": r"\textless{}", ">": r"\textgreater{}",
    "|": r"\textbar{}", '"': "''", "±": r"$\pm$", "†": r"$^\dagger$", "‡": r"$^\ddagger$", "§": r"\S{}",
    "¶": r"\P{}", "—": "---", "–": "--", "−": "$-$", "↑": r"$\uparrow$", "↓": r"$\downarrow$", "→": r"$\rightarrow$",
    "←": r"$\leftarrow$", "≥": r"$\geq$", "≤": r"$\leq$", "≠": r"$\neq$", "≈": r"$\approx$", "∼": r"$\sim$",
    "∝": r"$\propto$", "…": r"\ldots{}", "√": r"$\sqrt{}$", "×": r"$\times$", "·": r"$\cdot$", "∞": r"$\infty$",
    "∈": r"$\in$", "∑": r"$\sum$", "∫": r"$\int$", "°": r"$^\circ$", "½": r"$\frac12$", "²": r"$^2$", "³": r"$^3$",
    "¹": r"$^1$", "⁰": r"$^0$", "⁻": r"$^-$", "“": "``", "”": "''", "‘": "`", "’": "'", "\u00a0": "~",
}  # fmt: skip
_LIKE_LATIN = "ΑΒΕΖΗΙΚΜΝΟΡΤΧο"
"""Greek letters without a command, since a Latin letter looks the same."""


def escape_latex(text: str) -> str:
    """Text as LaTeX, in ASCII and the letters that LaTeX itself reads; newlines become spaces.

    A symbol without a command is written by its number, as [U+4E2D].
    """
    return "".join(_symbol(c) for c in " ".join(text.split()))


def _symbol(c: str) -> str:
    if c in _SYMBOLS:
        return _SYMBOLS[c]
    if ord(c) < 128:
        return c
    kind, _, name = unicodedata.name(c, "").rpartition(" LETTER ")
    if kind == "GREEK CAPITAL" and c not in _LIKE_LATIN and name.isalpha():
        return f"$\\{name.capitalize().replace('Lamda', 'Lambda')}$"
    if kind == "GREEK SMALL" and c not in _LIKE_LATIN and name.isalpha():
        return f"$\\{name.lower().replace('lamda', 'lambda')}$"
    if kind.startswith("LATIN") and ord(c) < 0x180:  # LaTeX reads these in UTF-8
        return c
    if kind.startswith("GREEK") and c in _LIKE_LATIN:
        return "o" if c == "ο" else unicodedata.normalize("NFKD", c).translate(_TO_LATIN)
    return f"[U+{ord(c):04X}]"


_TO_LATIN = str.maketrans("ΑΒΕΖΗΙΚΜΝΟΡΤΧ", "ABEZHIKMNOPTX")


def latex(grid: Grid) -> str:
    r"""The table as one `tabular` or several, for \usepackage{booktabs,array}; its note as a comment.

    Words that all lines share are in the comment above. A table wider than the text of an article has its metrics as
    rows if it has few lines, else it is split into blocks of columns that repeat the words.
    """
    words, shared = _words(grid)
    heads = [written(head.replace(" per ", "/")) for head in grid.heads]
    named = ", ".join([grid.title, *(f"{grid.words[j]} {text}" for j, text in shared.items())])
    out = [f"% {' '.join(named.split())}; needs \\usepackage{{{','.join(PACKAGES)}}}"]
    labels = [_width([grid.words[j], *(line.words[j] for line in grid.lines)], j < grid.left) for j in words]
    numbers = [_entry_width(grid, j, head) for j, head in enumerate(heads)]
    if sum(labels) + sum(numbers) > TEXT_WIDTH and heads and (across := _pivoted(grid, words, heads)):
        out += across
    else:
        blocks = _blocks(sum(labels), numbers)
        for i, block in enumerate(blocks):
            out += [f"% part {i + 1} of {len(blocks)}"] if len(blocks) > 1 else []
            out += _tabular(grid, words, heads, block)
            out += [""] if i + 1 < len(blocks) else []
    return "\n".join([*out, f"% {' '.join(grid.note.split())}"] if grid.note else out)


def _words(grid: Grid) -> tuple[list[int], dict[int, str]]:
    """The columns of words that are shown, and the text of the others, which all lines share."""
    shared = {
        j: texts.pop()
        for j in range(len(grid.words))
        if len(grid.lines) > 1 and len(texts := {line.words[j] for line in grid.lines}) == 1
    }
    shown = [j for j in range(len(grid.words)) if j not in shared]
    if not shown:
        shown = [max(0, grid.left - 1)]
        shared.pop(shown[0], None)
    return shown, shared


def _width(texts: Sequence[str], is_label: bool = False) -> float:
    width = max(map(len, texts)) * _LETTER + _GAP
    return min(width, _WIDEST_LABEL) if is_label else width


def _entry_width(grid: Grid, j: int, head: WrittenHead) -> float:
    place = len(grid.words) + j
    texts = [line.texts(grid.summary)[place] for line in grid.lines]
    factor = _BOLD if any(j in line.best for line in grid.lines) else 1.0
    return max(_width(head.lines), (_width(texts) - _GAP) * factor + _GAP)


def _blocks(labels: float, numbers: Sequence[float]) -> list[list[int]]:
    """The columns of numbers in blocks that fit next to the labels; at least one in each."""
    blocks: list[list[int]] = [[]]
    used = labels
    for j, width in enumerate(numbers):
        if blocks[-1] and used + width > TEXT_WIDTH:
            blocks.append([])
            used = labels
        blocks[-1].append(j)
        used += width
    if len(blocks) == 1:
        return blocks
    size = -(-len(numbers) // len(blocks))
    even = [list(range(k, min(k + size, len(numbers)))) for k in range(0, len(numbers), size)]
    fits = all(labels + sum(numbers[j] for j in block) <= TEXT_WIDTH for block in even)
    return even if len(even) == len(blocks) and fits else blocks


def _tabular(grid: Grid, words: Sequence[int], heads: Sequence[WrittenHead], block: Sequence[int]) -> list[str]:
    columns = "".join(_label_column(grid, j) if j < grid.left else "r" for j in words) + "r" * len(block)
    lines = max((len(heads[j].lines) for j in block), default=1)
    above = [[""] * (lines - len(heads[j].lines)) + heads[j].lines for j in block]
    rows = []
    for k in range(lines):
        own = [escape_latex(grid.words[j]) if k == lines - 1 else "" for j in words]
        rows.append(" & ".join([*own, *(escape_latex(texts[k]) for texts in above)]) + r" \\")
    body: list[str] = []
    firsts = [line.words[words[0]] for line in grid.lines]
    grouped = len(set(firsts)) < len(firsts)
    for place, line in enumerate(grid.lines):
        if grouped and place and firsts[place] != firsts[place - 1]:
            body.append(r"\midrule")
        texts = line.texts(grid.summary)
        own = [_label(grid, texts[j], j) if j < grid.left else _number(texts[j]) for j in words]
        body.append(" & ".join([*own, *(_shown(grid, line, texts, j) for j in block)]) + r" \\")
    return _framed(columns, rows, body)


def _pivoted(grid: Grid, words: Sequence[int], heads: Sequence[WrittenHead]) -> list[str]:
    """The metrics as rows and the lines as columns, where these are few and fit; else empty."""
    if not 1 < len(grid.lines) <= _MOST_ROWS_AS_COLUMNS:
        return []
    named = [[line.words[j] if j < grid.left else f"n = {line.words[j]}" for j in words] for line in grid.lines]
    broken = [[_broken(text) for text in own] for own in named]
    tallest = [max(len(own[k]) for own in broken) for k in range(len(words))]
    names = [
        [text for k, lines in enumerate(own) for text in ([""] * (tallest[k] - len(lines)) + lines)] for own in broken
    ]
    cells = [line.texts(grid.summary)[len(grid.words) :] for line in grid.lines]
    widths = [_width([*texts, *own]) * _BOLD for texts, own in zip(cells, names, strict=True)]
    first = _width([head.line for head in heads])
    if first + sum(widths) > TEXT_WIDTH:
        return []
    rows = [" & ".join(["", *(escape_latex(own[k]) for own in names)]) + r" \\" for k in range(len(names[0]))]
    body = []
    for j, head in enumerate(heads):
        entries = [_shown(grid, line, line.texts(grid.summary), j) for line in grid.lines]
        body.append(" & ".join([escape_latex(head.line), *entries]) + r" \\")
    return _framed("l" + "r" * len(grid.lines), rows, body)


def _broken(text: str) -> list[str]:
    """A name on several lines, broken after underscores."""
    lines = [""]
    for part in re.findall(r"[^_]*_?", text):
        if lines[-1] and len(lines[-1]) + len(part) > _LETTERS_OF_A_NAME:
            lines.append("")
        lines[-1] += part
    return lines


def _framed(columns: str, head: Sequence[str], body: Sequence[str]) -> list[str]:
    start = [r"{\small\setlength{\tabcolsep}{4pt}%", f"\\begin{{tabular}}{{@{{}}{columns}@{{}}}}", r"\toprule"]
    return [*start, *head, r"\midrule", *body, r"\bottomrule", r"\end{tabular}}"]


def _label_column(grid: Grid, j: int) -> str:
    return "l" if _is_narrow(grid, j) else rf">{{\raggedright\arraybackslash}}p{{{_WIDEST_LABEL - _GAP:.0f}pt}}"


def _is_narrow(grid: Grid, j: int) -> bool:
    return _width([grid.words[j], *(line.words[j] for line in grid.lines)]) <= _WIDEST_LABEL


def _label(grid: Grid, text: str, j: int) -> str:
    """Words; in a wide column they may be broken after an underscore, a point, a comma or an equals sign."""
    escaped = escape_latex(text)
    if _is_narrow(grid, j):
        return escaped
    for mark in (r"\_", ".", ",", "="):
        escaped = escaped.replace(mark, mark + r"\allowbreak{}")
    return escaped


def _number(text: str) -> str:
    # A hyphen before a digit is a minus sign, which LaTeX must set in math mode.
    escaped = escape_latex(text)
    return "$-$" + escaped[1:] if text.startswith("-") else escaped


def _shown(grid: Grid, line: Line, texts: Sequence[str], j: int) -> str:
    text = _number(texts[len(grid.words) + j])
    return f"\\textbf{{{text}}}" if j in line.best else text
