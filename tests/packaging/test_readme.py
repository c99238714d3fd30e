"""The commands of the README files run, in their order, in one folder; the example method works; tables are up to date.

Every line of every ```bash block is a test. A command is checked as it is written (nothing unknown
in it) and then run with the overrides of SMALLER behind it, so that it takes seconds. Blocks behind
`<!-- not run: reason -->` are installations, which .ci/run does, or need a
person's own files, which have tests of their own.
"""

from __future__ import annotations

import ast
import os
import re
import runpy
import shlex
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from bnn_runner.cli import main as bnn_run
from bnn_runner.cli import predict as bnn_predict
from bnn_runner.cli import report as bnn_report
from bnn_runner.config.validate import check
from tests.choices import exhaustive_unless
from tests.test_layers import LAYERS

ROOT = Path(__file__).parents[2]
FILES = ["README.md", "conf/README.md", "bnn_runner/README.md"]
TEXTS = {name: (ROOT / name).read_text(encoding="utf-8") for name in FILES}
README = TEXTS["README.md"]
CODE = TEXTS["bnn_runner/README.md"]

BLOCK = re.compile(r"(?:<!-- not run: (?P<reason>.+?) -->\n)?```(?P<language>\w+)\n(?P<body>.*?)```", re.DOTALL)
NEED_FILES = ("data=mnist", "data=cifar10", "data=concrete", "data=yacht", "experiment=yacht_methods")

# What makes a command small, by a word that it contains: the first that fits is put behind it.
SMALLER = {
    "data=mnist": "schedule.epochs=1 data.train_size=200 data.test_size=100 eval.num_draws=8 eval.max_ood=100 "
    "figures=false",
    "data=cifar10": "schedule.epochs=2 data.train_size=60 data.test_size=40 eval.num_draws=4 eval.max_ood=40 "
    "figures=false",
    "experiment=yacht_methods": "schedule.epochs=4 eval.num_draws=20 figures=false",
    "data=concrete": "schedule.epochs=4 figures=false",
    "data=two_moons": "schedule.epochs=4 hyper.num=4 eval.num_draws=50 figures=false",
    "bnn-run": "schedule.epochs=20 eval.num_draws=50",
}


def blocks(language: str) -> list[tuple[str, str]]:
    """(body, reason why it is not run or "") of the blocks of a language."""
    return [
        (m["body"], m["reason"] or "")
        for text in TEXTS.values()
        for m in BLOCK.finditer(text)
        if m["language"] == language
    ]


LONG = ("bnn-run -m data=mnist", "bnn-run data=cifar10")
"""Commands that take many seconds even so; they are marked `exhaustive`."""
PROGRAMS = ("bnn-run", "bnn-report", "bnn-predict")
COMMANDS = [line for body, reason in blocks("bash") if not reason for line in body.splitlines() if line.strip()]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """One folder for all commands, with the README's own method in it."""
    path = tmp_path_factory.mktemp("readme")
    [(method, _)], [(config, _)] = blocks("python"), blocks("yaml")
    (path / "mine" / "conf" / "method").mkdir(parents=True)
    (path / "mine" / "weight_noise.py").write_text(method, encoding="utf-8")
    (path / "mine" / "conf" / "method" / "weight_noise.yaml").write_text(config, encoding="utf-8")
    sys_path = list(sys.path)
    yield path
    sys.path[:] = sys_path
    sys.modules.pop("weight_noise", None)


def smaller(words: list[str]) -> list[str]:
    """The words with the overrides behind them that make them small, and two seeds for three."""
    if words[0] != "bnn-run" or "--help" in words:
        return words
    words = [word.replace("seed=0,1,2", "seed=0,1") for word in words]
    return [*words, *next(more for word, more in SMALLER.items() if word in words).split()]


def test_there_is_something_to_run() -> None:
    assert len(COMMANDS) >= 10
    reasons = {reason for _, reason in blocks("bash") if reason}
    assert len(reasons) == 3, "two installations, a person's files"
    unknown = [line for line in COMMANDS if shlex.split(line)[0] not in PROGRAMS]
    assert not unknown


@pytest.mark.parametrize("line", COMMANDS)
def test_the_command_as_written_has_no_mistake(line: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)
    words = shlex.split(line)
    if words[0] == "bnn-report":
        bnn_report._parser().parse_args(words[1:])
        return
    if words[0] == "bnn-predict":
        bnn_predict._parser().parse_args(words[1:])
        return
    flags = bnn_run.read_flags(words[1:])
    check(flags.overrides, flags.config_dirs, flags.multirun)


@pytest.mark.parametrize("line", exhaustive_unless(lambda line: not line.startswith(LONG), COMMANDS))
def test_the_command_runs(
    line: str, folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    words = shlex.split(line)
    if any(need in words for need in NEED_FILES) and not os.environ.get("BNN_DATA_DIR"):
        pytest.skip("needs data files, and BNN_DATA_DIR is not set")
    monkeypatch.chdir(folder)
    if words[0] == "bnn-predict":
        assert bnn_predict.main(words[1:]) == 0
        return
    if words[0] == "bnn-report":
        if not os.environ.get("BNN_DATA_DIR"):
            pytest.skip("reports on the runs before it, which need data files, and BNN_DATA_DIR is not set")
        assert bnn_report.main(words[1:]) == 0
        assert ("| yacht | " if "yacht" in words else "| mnist | ") in capsys.readouterr().out
        return
    assert bnn_run.run(smaller(words)[1:]) == 0
    told = capsys.readouterr().out
    if words[1:] == ["data=mnist", "method=laplace_kfac"]:
        assert "nothing to train" in told
    if words[1:] == ["data=mnist", "method=ensemble"]:
        assert "1 from the cache, 4 to train" in told


def test_tables_are_up_to_date() -> None:
    script = runpy.run_path(str(ROOT / "scripts" / "readme_outputs.py"))
    for path, text in script["put"](script["tables"]()).items():
        assert path.read_text(encoding="utf-8") == text, "run python scripts/readme_outputs.py"


@pytest.mark.parametrize("name", FILES)
def test_links_and_pictures_are_there(name: str) -> None:
    linked = re.findall(r"\]\(([^)#:]+)\)", TEXTS[name])
    assert linked or name != "README.md"
    assert not [link for link in linked if not ((ROOT / name).parent / link).is_file()]


def test_the_readme_is_a_landing_page() -> None:
    assert len(README.splitlines()) <= 200


# ------------------------------------------------------------------------- the walk through the code

STEP = re.compile(r"^\d+\. `([\w/]+\.py):([\w.]+)`", re.MULTILINE)


def defined(path: Path) -> set[str]:
    """Functions, classes and methods of a module, methods as Class.method."""
    found = set()
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            found.add(node.name)
        if isinstance(node, ast.ClassDef):
            found |= {f"{node.name}.{item.name}" for item in node.body if isinstance(item, ast.FunctionDef)}
    return found


def test_the_walk_from_the_command_line_to_the_scores_exists() -> None:
    """Planted bugs: a step whose function was renamed; a thirteenth step."""
    steps = STEP.findall(CODE)
    assert 10 <= len(steps) <= 12
    assert not [(file, name) for file, name in steps if name not in defined(ROOT / "bnn_runner" / file)]


def test_paths_named_in_the_code_readme_exist() -> None:
    named = re.findall(r"`((?:[a-z_]+/)+[a-z_]+\.(?:py|bib))(?::[\w.]+)?`", CODE)
    assert len(named) > 12
    absent = {n for n in named if not (ROOT / n).is_file() and not (ROOT / "bnn_runner" / n).is_file()}
    assert absent == {"mine/weight_noise.py"}, "the example's own file, and no other"


def test_every_package_stands_in_the_table_of_layers() -> None:
    rows = re.findall(r"^\| (`[^|]+) \|", CODE.partition("## Layers")[2].partition("## Words")[0], re.MULTILINE)
    named = [name for row in rows for name in re.findall(r"`(\w+)`", row)]
    assert sorted(named) == sorted({name for layer in LAYERS for name in layer} - {"__init__"})
