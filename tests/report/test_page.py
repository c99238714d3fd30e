"""The HTML page: whole in one file, and sorted by a click in a real browser."""

import html
import json
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


def in_browser(text, tmp_path, script, width=1400):
    """The page after a script has run in it, at a width of the window."""
    file = tmp_path / f"page{width}{len(script)}.html"
    file.write_text(text.replace("</body>", f"<script>{script}</script></body>"))
    command = [CHROMIUM, "--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={tmp_path / 'profile'}"]
    command += [f"--window-size={width},900", "--enable-logging=stderr", "--v=0", "--dump-dom", file.as_uri()]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    assert "CONSOLE" not in done.stderr, re.findall(r".*CONSOLE.*", done.stderr)
    return done.stdout


@pytest.mark.skipif(CHROMIUM is None, reason="no chromium on the path")
def test_a_click_sorts_the_table_without_error_or_request(page, tmp_path):
    """Planted bugs: 12 before 2 (sorted as text); NaN first; the worst first; a script error; a request."""
    heads = Page(page.read_text()).rows[0]
    rmse, joint = (
        next(i for i, t in enumerate(heads) if t.startswith(word)) for word in ("rmse", "joint_loglik tau=10")
    )
    script = "const all = document.querySelectorAll('th'), table = all[0].closest('table'), orders = [];"
    for column in (rmse, rmse, joint):
        script += f"all[{column}].click(); orders.push(Array.from(table.tBodies[0].rows, r => r.cells[2].textContent));"
    script += "document.body.dataset.orders = JSON.stringify(orders);"
    found = in_browser(page.read_text(), tmp_path, script)
    assert json.loads(html.unescape(re.search(r'data-orders="([^"]*)"', found)[1])) == [
        ["laplace", "ensemble", "map", "swag_diag", "swag", "sgld"],
        ["swag", "swag_diag", "map", "ensemble", "laplace", "sgld"],
        ["laplace", "ensemble", "map", "swag", "swag_diag", "sgld"],
    ]


MEASURE = """
const box = document.querySelector('.table'), row = box.querySelector('tbody tr');
box.scrollLeft = 10000;
const cell = row.querySelector('.m').getBoundingClientRect(), frame = box.getBoundingClientRect();
const text = document.createRange();
text.selectNodeContents(row.querySelector('.m'));
const out = {
  page: document.documentElement.scrollWidth, window: window.innerWidth,
  scrolled: box.scrollLeft, method: cell.left - frame.left, seen: text.getBoundingClientRect().right - frame.left,
  frame: frame.width, head: box.querySelectorAll('th')[4].offsetHeight, line: row.offsetHeight,
  letters: parseFloat(getComputedStyle(row.cells[0]).fontSize),
  picture: document.querySelector('img').getBoundingClientRect().width,
  natural: document.querySelector('img').naturalWidth * 96 / 150,
};
document.body.dataset.measured = JSON.stringify(out);
"""


@pytest.mark.skipif(CHROMIUM is None, reason="no chromium on the path")
@pytest.mark.parametrize("width", [500, 1400])
def test_the_page_is_readable_in_a_narrow_and_a_wide_window(page, tmp_path, width):
    """Planted bugs: a page that scrolls sideways; heads on one line; methods that scroll out of view; small figures."""
    found = in_browser(page.read_text(), tmp_path, MEASURE, width)
    seen = json.loads(html.unescape(re.search(r'data-measured="([^"]*)"', found)[1]))
    assert abs(seen["window"] - width) <= 20 and seen["page"] <= seen["window"]
    assert seen["letters"] >= 13 and seen["picture"] == pytest.approx(seen["natural"], abs=1)
    assert seen["method"] >= -1 and seen["seen"] <= seen["frame"] and seen["head"] > 1.5 * seen["line"]
    assert seen["scrolled"] > 0 or width > 500


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
