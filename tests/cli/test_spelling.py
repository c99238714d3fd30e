"""Options of the other commands in the spelling of bnn-run."""

from __future__ import annotations

import argparse
from pathlib import Path

import pytest

from bnn_runner.cli import open_run, predict, prune, report
from bnn_runner.cli.main import run
from bnn_runner.cli.spelling import apply_settings, with_hyphens
from bnn_runner.errors import UserError


def read(words: list[str]) -> argparse.Namespace:
    """What bnn-report makes of its arguments."""
    parser = report._parser()
    arguments = parser.parse_intermixed_args(with_hyphens(words))
    arguments.filters = apply_settings(parser, arguments, arguments.filters, report._SETTINGS)
    return arguments


@pytest.mark.parametrize(
    ("words", "name", "value"),
    [
        (["output_dir=x"], "output_dir", Path("x")),
        (["output_dir='a b'"], "output_dir", Path("a b")),
        (["output_dir=größe"], "output_dir", Path("größe")),
        (["--output_dir", "x"], "output_dir", Path("x")),
        (["--output_dir=x"], "output_dir", Path("x")),
        (["output_dir=null"], "output_dir", Path("outputs")),
        (["metric=[rmse,crps]"], "metrics", "rmse,crps"),
        (["metric=rmse,crps"], "metrics", "rmse,crps"),
        (["metrics=all"], "metrics", "all"),
        (["figures=false"], "figure", False),
        (["name=mine"], "name", "mine"),
        (["format=[csv,md]"], "format", "csv,md"),
        (["rows=method", "columns=data"], "columns", "data"),
        (["summary=median"], "summary", "median"),
        (["data=yacht", "--metrics", "rmse", "seed=0,1"], "filters", ["data=yacht", "seed=0,1"]),
    ],
)
def test_report(words: list[str], name: str, value: object) -> None:
    assert getattr(read(words), name) == value


@pytest.mark.parametrize(
    ("word", "hint"), [("figures=maybe", "true or false"), ("summary=mode", "mean, median"), ("figures=2", "got 2")]
)
def test_report_refuses(word: str, hint: str) -> None:
    with pytest.raises(UserError, match=hint):
        read([word])


@pytest.mark.parametrize(
    ("words", "name", "value"),
    [
        (["latest", "output_dir=x"], "output_dir", Path("x")),
        (["output_dir=x", "latest"], "run", "latest"),
        (["latest", "--data", "new.csv", "device=cpu"], "device", "cpu"),
        (["latest", "allow=[a,b]"], "allow", "a,b"),
        (["latest", "eval.num_draws=7"], "draws", 7),
        (["latest", "--data_dir", "d"], "data_dir", Path("d")),
        (["latest", "level=0.5"], "level", 0.5),
        (["latest", "device=gpu"], "device must be one of auto, cpu", None),
        (["latest", "eval.num_draws=many"], "eval.num_draws=many: the value does not fit", None),
        (["latest", "seed=3"], "'seed=3' is not an option of bnn-predict", None),
        (["output_dir=x"], "RUN is missing", None),
    ],
)
def test_predict(words: list[str], name: str, value: object) -> None:
    parser = predict._parser()
    arguments = parser.parse_intermixed_args(with_hyphens([*(["--data", "new.csv"]), *words]))
    if value is None:
        with pytest.raises(UserError, match=name):
            open_run.read_options(parser, arguments, {"level": "level"})
    else:
        open_run.read_options(parser, arguments, {"level": "level"})
        assert getattr(arguments, name) == value


def test_whole_commands(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert report.main([f"output_dir={tmp_path / 'none'}"]) == 2
    assert f"there is no folder {tmp_path / 'none'}" in capsys.readouterr().err
    assert prune.main(["latest", f"output_dir={tmp_path}"]) == 2
    assert "There are no finished runs" in capsys.readouterr().err
    assert run(["--output-dir", "x"]) == 2 and "output_dir=..." in capsys.readouterr().err
