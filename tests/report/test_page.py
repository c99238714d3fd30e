"""The HTML page: whole in one file, and sorted by a click in a real browser."""

import re
import shutil
import subprocess
from html.parser import HTMLParser

import pytest

from bnn_runner.cli.report import main

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")


class Page(HTMLParser):
    """Tags and attributes, and the text of each cell of the first table."""

    def __init__(self, text):
        super().__init__()
        self.asked, self.rows, self.inside = [], [], False
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.asked += [v for k, v in attrs if k in ("src", "href") and not v.startswith("data:")]
        if tag == "tr":
            self.rows.append([])
        self.inside = tag in ("td", "th", "b")
        if tag in ("td", "th"):
            self.rows[-1].append("")

    def handle_data(self, data):
        if self.inside:
            self.rows[-1][-1] += data.strip()


@pytest.fixture
def page(nine_cells):
    nine_cells("sgld", 0, [("rmse", "nan")], hash8="3000abcd")
    nine_cells("swag", 0, [("rmse", 12.0)], hash8="4000abcd")
    nine_cells("swag_diag", 0, [("rmse", 2.0)], hash8="5000abcd")
    nine_cells("swag", 1, None, status="FAILED", reason="<script>alert(1)</script>", hash8="4000abcd")
    assert main(["--output-dir", str(nine_cells.outputs)]) == 0
    return nine_cells.outputs / "results" / "comparison.html"


def test_the_page_needs_no_other_file(page):
    """Planted bugs: a picture by its path; text of the configuration as markup."""
    text = page.read_text()
    found = Page(text)
    assert found.asked == [] and "<script>alert" not in text and "&lt;script&gt;alert" in text
    assert text.count("data:image/png;base64,") == 2
    assert [r[2] for r in found.rows[1:] if r] == ["map", "ensemble", "laplace", "sgld", "swag", "swag_diag"]


@pytest.mark.skipif(CHROMIUM is None, reason="no chromium on the path")
def test_a_click_sorts_the_table_without_error_or_request(page, tmp_path):
    """Planted bugs: 12 before 2 (sorted as text); NaN first; a script error; a request."""
    column = next(i for i, t in enumerate(Page(page.read_text()).rows[0]) if t.startswith("rmse"))
    clicks = f"<script>document.querySelectorAll('th')[{column}].click();</script>"
    once, twice = tmp_path / "once.html", tmp_path / "twice.html"
    once.write_text(page.read_text().replace("</body>", f"{clicks}</body>"))
    twice.write_text(page.read_text().replace("</body>", f"{clicks}{clicks}</body>"))
    orders = []
    for file in (once, twice):
        command = [CHROMIUM, "--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={tmp_path / 'profile'}"]
        command += ["--enable-logging=stderr", "--v=0", "--dump-dom", file.as_uri()]
        done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
        assert "CONSOLE" not in done.stderr, re.findall(r".*CONSOLE.*", done.stderr)
        orders.append([r[2] for r in Page(done.stdout).rows[1:] if r])
    assert orders == [
        ["laplace", "ensemble", "map", "swag_diag", "swag", "sgld"],
        ["swag", "swag_diag", "map", "ensemble", "laplace", "sgld"],
    ]


def test_figures_of_runs_are_folded_into_the_page(nine_cells):
    """Planted bugs: figures of every seed; a picture named by its path."""
    from bnn_runner.report.style import new_figure, save

    for seed in (1, 2):
        folder = next(nine_cells.outputs.glob(f"runs/yacht/mlp/laplace/{seed}-*"))
        save(new_figure()[0], folder / "figures" / f"bands{seed}.png")
    save(new_figure()[0], next(nine_cells.outputs.glob("runs/yacht/mlp/map/0-*")) / "figures" / "curves.png")
    assert main(["--output-dir", str(nine_cells.outputs), "--no-figure"]) == 0
    text = (nine_cells.outputs / "results" / "comparison.html").read_text()
    assert text.count("<details>") == 1 and "yacht/mlp/map, seed 0" in text and 'alt="curves"' in text
    assert Page(text).asked == []
