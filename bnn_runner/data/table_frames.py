"""Tables in binary files, read by pandas: Parquet and .xlsx, with their cells as texts like those of a text file."""

from __future__ import annotations

import io
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bnn_runner.data.table_bytes import Content
from bnn_runner.data.table_layout import Rows
from bnn_runner.errors import UserError

if TYPE_CHECKING:
    import pandas as pd

_EXTRAS = {"parquet": ("pyarrow", "parquet", "Parquet"), "xlsx": ("openpyxl", "excel", ".xlsx")}


@dataclass(frozen=True)
class Frame:
    """Rows of texts; `header` is None where the first row may be the header (a spreadsheet)."""

    header: tuple[str, ...] | None
    rows: Rows
    notes: tuple[str, ...]


def read_frame(path: Path, content: Content) -> Frame:
    """The table in a Parquet file, or the first sheet of a spreadsheet.

    Raises:
        UserError: the package that reads it is not installed, or the file is damaged.
    """
    package, extra, name = _EXTRAS[content.kind]
    try:
        __import__(package)
    except ImportError:
        raise UserError(
            f"{path}: reading {name} requires {package}. Install it with pip install 'bnn-runner[{extra}]', or save "
            "the table as CSV."
        ) from None
    import pandas as pd

    try:
        if content.kind == "parquet":
            return of_frame(pd.read_parquet(io.BytesIO(content.data), engine="pyarrow"))
        with pd.ExcelFile(io.BytesIO(content.data), engine="openpyxl") as book:
            sheets = [str(sheet) for sheet in book.sheet_names]
            options: dict[str, Any] = {"header": None, "dtype": object, "keep_default_na": False, "na_values": []}
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # about styles
                cells = pd.read_excel(book, sheet_name=sheets[0], **options)
    except Exception as error:  # each library has its own errors for a damaged file
        raise UserError(
            f"Could not read {path} as {name}: {str(error).rstrip('.')}. Save it again, or as CSV."
        ) from None
    others = f"; not read: {', '.join(sheets[1:])}" if len(sheets) > 1 else ""
    rows = of_frame(cells).rows
    full = [i for i, row in enumerate(rows.cells) if any(row)]
    last = max((j for i in full for j, cell in enumerate(rows.cells[i]) if cell), default=-1)
    kept = Rows([rows.cells[i][: last + 1] for i in full], [i + 1 for i in full])
    return Frame(None, kept, (f"sheet {sheets[0]!r}{others}",))


def of_frame(frame: pd.DataFrame) -> Frame:
    """A data frame with its cells as texts; its own index is not a column."""
    columns = [[text_of(value) for value in frame.iloc[:, i].tolist()] for i in range(frame.shape[1])]
    rows = list(zip(*columns, strict=True))
    header = tuple(str(name) for name in frame.columns)
    return Frame(header, Rows(rows, list(range(1, len(rows) + 1))), ())


def text_of(value: Any) -> str:
    """A cell as text: numbers with all their digits, "" for a missing value.

    >>> [text_of(v) for v in (3, 2.5, None, float("nan"), True, " red ")]
    ['3', '2.5', '', '', 'True', 'red']
    """
    if value is None or type(value).__name__ in ("NAType", "NaTType") or value != value:
        return ""
    if isinstance(value, float):
        return repr(int(value)) if value.is_integer() and abs(value) < 1e15 else repr(value)
    return str(value).strip()
