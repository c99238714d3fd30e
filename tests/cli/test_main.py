"""The command as a whole, with a stub in place of the runner: exit codes, isolation of jobs, what is left behind."""

from __future__ import annotations

import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from bnn_runner._version import __version__
from bnn_runner.cli.help import choice_keys, meanings
from bnn_runner.cli.launch import clear_scratch, make_scratch
from bnn_runner.cli.main import run
from bnn_runner.config.groups import Catalogue
from bnn_runner.errors import Interrupted, RunFailed, UserError

TOY = ["data=toy", "method=toyfit", "metric=[count]", "allow=[toykit]"]


@pytest.fixture
def command(toys: Path):
    """Run a command line with the toys' folder; returns the exit code."""

    def go(*words: str) -> int:
        return run(["--config-dir", str(toys), *TOY, *words])

    return go


def outcome(status: str, message: str = ""):
    from types import SimpleNamespace

    return SimpleNamespace(status=status, message=message, cells=())


# ---------------------------------------------------------------------------------------- text


def test_help_names_every_choice_with_its_line(capsys: pytest.CaptureFixture[str], toys: Path) -> None:
    assert run(["--help", "--config-dir", str(toys)]) == 0
    text = capsys.readouterr().out
    catalogue = Catalogue([toys])
    count = 0
    for group in catalogue.groups:
        for choice in catalogue.choices(group):
            line = catalogue.help_line(group, choice)
            assert line, f"conf/{group}/{choice}.yaml has no help line"
            assert f"{choice} " in text and line in text
            count += 1
    assert count > 20
    assert text.count("bnn-run ") >= 4 and "bnn-report" in text
    for key in ("seed=0", "device=auto", "eval.num_draws=100", "likelihood.noise=learned", "time_limit=null"):
        (line,) = [x for x in text.splitlines() if x.strip().startswith(key)]
        assert len(line.split()) > 3, f"{key} has no meaning next to it"


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["--version"]) == 0
    assert capsys.readouterr().out.strip() == f"bnn-run {__version__}"


@pytest.mark.parametrize(
    ("words", "hint"),
    [
        (["--seed", "3"], "seed=..."),
        (["--method=map"], "method=map"),
        (["--multrun"], "--multirun"),
        (["--config-dir"], "requires a value"),
        (["--config-dir", "/nowhere/at/all"], "must be a folder"),
        (["--config-name", "x"], "not supported"),
        (["--cfg", "jobs"], "must be job, hydra or all"),
    ],
)
def test_flags_are_checked(words: list[str], hint: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(words) == 2
    assert hint in capsys.readouterr().err


def test_mistakes_in_a_process_of_their_own(tmp_path: Path) -> None:
    words = ["data=mnst", "schedule.epohcs=3", "device=gpu"]
    done = subprocess.run(
        [sys.executable, "-m", "bnn_runner.cli.main", *words],
        capture_output=True,
        text=True,
        env={"PYTHONPATH": str(Path(__file__).parents[2]), "PATH": "/usr/bin:/bin"},
        cwd=tmp_path,
    )
    assert done.returncode == 2 and done.stdout == ""
    assert "3 errors" in done.stderr and "Traceback" not in done.stderr
    assert not list(tmp_path.iterdir())


# ---------------------------------------------------------------------------------------- one run


def test_plain_command_runs_the_default(runner, toys: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run([]) == 0
    (experiment,) = runner.experiments
    assert experiment.choices["data"] == "gap1d" and experiment.choices["method"] == "laplace"
    assert experiment.settings.output_dir == Path.cwd() / "outputs"
    left = [p for p in Path.cwd().rglob("*") if p.is_file() or p.name == ".hydra"]
    assert left == []


def test_a_run_gets_its_expanded_overrides(command, runner) -> None:
    assert command("seed=3", "schedule.epochs=2", "output_dir=out") == 0
    (experiment,), (overrides,) = runner.experiments, runner.overrides
    assert experiment.settings.seed == 3 and experiment.schedule.epochs == 2
    assert "model=toynet" in overrides and "schedule.epochs=2" in overrides and "schedule.epochs=11" not in overrides
    assert not any(o.startswith(("+", "hydra")) for o in overrides)


@pytest.mark.parametrize(("status", "code"), [("done", 0), ("skipped", 0), ("failed", 1)])
def test_exit_codes(command, runner, status: str, code: int, capsys: pytest.CaptureFixture[str]) -> None:
    runner.answer = lambda experiment: outcome(status, "because")
    assert command() == code
    assert ("because" in capsys.readouterr().err) == (code != 0)


def raiser(error: BaseException):
    def answer(experiment):
        raise error

    return answer


@pytest.mark.parametrize(
    ("error", "code", "traceback"),
    [
        (UserError("the file is missing. Put it there."), 2, False),
        (RunFailed("the loss is not finite"), 1, False),
        (RuntimeError("a bug"), 1, True),
        (SystemExit(0), 1, False),
        (Interrupted("cut at epoch 3"), 130, False),
        (KeyboardInterrupt(), 130, False),
    ],
)
def test_ends_of_a_run(command, runner, error, code: int, traceback: bool, capsys: pytest.CaptureFixture[str]) -> None:
    runner.answer = raiser(error)
    assert command() == code
    told = capsys.readouterr().err
    assert ("Traceback" in told) == traceback
    assert "HYDRA_FULL_ERROR" not in told
    assert str(error) in told
    assert not list(Path.cwd().rglob(".hydra"))


def test_unfit_pairs_and_ranges_end_with_two(command, runner, capsys: pytest.CaptureFixture[str]) -> None:
    assert command("model.square=true", "schedule.lr=-1") == 2
    told = capsys.readouterr().err
    assert "model.square=false" in told and "schedule.lr must be positive" in told and "Traceback" not in told
    assert not runner.experiments


def test_what_hydra_alone_finds_is_a_mistake_too(command, runner, capsys: pytest.CaptureFixture[str]) -> None:
    assert command("hydra/launcher=nowhere") == 2
    told = capsys.readouterr().err
    assert "nowhere" in told and "Traceback" not in told and "HYDRA_FULL_ERROR" not in told


def test_unwritable_output_is_a_mistake(command, runner, capsys: pytest.CaptureFixture[str]) -> None:
    Path("taken").write_text("a file")
    assert command("output_dir=taken/below") == 2
    assert "output_dir" in capsys.readouterr().err


def test_cfg_job_shows_the_recommended_settings(command, runner, capsys: pytest.CaptureFixture[str]) -> None:
    assert command("--cfg", "job", "--package", "schedule") == 0
    assert "epochs: 11" in capsys.readouterr().out
    assert not runner.experiments and not list(Path.cwd().iterdir())


# ---------------------------------------------------------------------------------------- sweeps


@pytest.mark.exhaustive
def test_a_sweep_over_data_sets_expands_each_job(command, runner, capsys: pytest.CaptureFixture[str]) -> None:
    assert command("-m", "data=toy,bare", "schedule.lr=0.3", "model.hidden=[8]") == 0
    ran = [(e.choices["data"], e.choices["model"]) for e in runner.experiments]
    assert ran == [("toy", "toynet"), ("bare", "mlp")]
    assert {e.schedule.lr for e in runner.experiments} == {0.3}
    assert runner.experiments[0].schedule.epochs == 11
    assert {tuple(e.model.hidden) for e in runner.experiments} == {(8,)}
    assert "2 jobs: 2 done" in capsys.readouterr().err
    assert not list(Path.cwd().rglob(".hydra"))


def test_one_failure_stops_no_other_job(command, runner, capsys: pytest.CaptureFixture[str]) -> None:
    errors = [UserError("reason 0."), RunFailed("reason 1\nand more"), ValueError("reason 2"), SystemExit("reason 3")]

    def answer(experiment):
        if experiment.settings.seed < len(errors):
            raise errors[experiment.settings.seed]
        return outcome("done")

    runner.answer = answer
    assert command("-m", "seed=0,1,2,3,4") == 1
    assert [e.settings.seed for e in runner.experiments] == [0, 1, 2, 3, 4]
    told = capsys.readouterr().err
    assert told.count("Traceback") == 1, "a bug shows its traceback, and nothing else does"
    summary = told[told.index("5 jobs: 1 done, 4 failed") :].splitlines()
    assert len(summary) == 5
    for number, line in enumerate(summary[1:]):
        assert f"seed={number}" in line and f"reason {number}" in line


def test_a_mistake_of_one_job_stops_no_other(command, runner, capsys: pytest.CaptureFixture[str]) -> None:
    assert command("-m", "model.square=true,false") == 2
    assert [e.model.square for e in runner.experiments] == [False]
    assert "1 done, 1 failed" in capsys.readouterr().err


def test_interrupt_stops_the_whole_sweep(command, runner) -> None:
    def answer(experiment):
        if experiment.settings.seed == 1:
            raise KeyboardInterrupt
        return outcome("done")

    runner.answer = answer
    assert command("-m", "seed=0,1,2") == 130
    assert [e.settings.seed for e in runner.experiments] == [0, 1]
    assert not list(Path.cwd().rglob(".hydra"))


def test_multirun_without_a_sweep_is_one_job(command, runner, capsys: pytest.CaptureFixture[str]) -> None:
    assert command("-m", "seed=4") == 0
    assert len(runner.experiments) == 1 and "1 job" in capsys.readouterr().err


def test_an_experiment_brings_its_sweep(toys: Path, runner) -> None:
    words = ["-m", "--config-dir", str(toys), "experiment=grid", "allow=[toykit]", "metric=[count]", "seed=3"]
    assert run(words) == 0
    assert [(e.settings.seed, e.schedule.lr) for e in runner.experiments] == [(3, 0.1), (3, 0.2)]


def test_paths_are_anchored_to_the_start(command, runner, monkeypatch: pytest.MonkeyPatch) -> None:
    start = Path.cwd()
    monkeypatch.setenv("HOME", str(start / "home"))
    assert command("hydra.job.chdir=true", "output_dir=out", "data_dir=../data", "cache_dir=~/cache") == 0
    settings = runner.experiments[0].settings
    assert settings.output_dir == start / "out"
    assert settings.data_path == start.parent / "data"
    assert settings.cache_path == start / "home" / "cache"
    assert Path.cwd() == start


def test_commands_of_one_second_do_not_meet(tmp_path: Path) -> None:
    def one(_: int) -> Path:
        scratch = make_scratch(tmp_path / "out")
        clear_scratch(scratch)
        return scratch

    with ThreadPoolExecutor(16) as pool:
        made = list(pool.map(one, range(200)))
    assert len(set(made)) == 200
    assert not (tmp_path / "out" / ".hydra").exists()


def test_a_launchers_own_logs_stay(tmp_path: Path) -> None:
    scratch = make_scratch(tmp_path)
    (scratch / "multirun.yaml").write_text("x")
    (scratch / ".submitit").mkdir()
    (scratch / ".submitit" / "log").write_text("x")
    clear_scratch(scratch)
    assert [p.name for p in scratch.rglob("*") if p.is_file()] == ["log"]


@pytest.mark.exhaustive
def test_a_reader_that_leaves_does_not_stop_the_run(tmp_path: Path) -> None:
    """`bnn-run | head -1`: the cell is finished all the same, and no traceback is shown."""
    words = ["schedule.epochs=3", "figures=false", "eval.num_draws=10", "metric=[marginal]"]
    done = subprocess.run(
        f"{sys.executable} -m bnn_runner.cli.main {' '.join(words)} | head -1",
        shell=True,
        capture_output=True,
        text=True,
        env={"PYTHONPATH": str(Path(__file__).parents[2]), "PATH": "/usr/bin:/bin"},
        cwd=tmp_path,
    )
    assert done.stdout.count("\n") == 1 and "Traceback" not in done.stderr
    assert list(tmp_path.glob("outputs/runs/gap1d/mlp/laplace/*/DONE"))


@pytest.mark.parametrize("group", sorted(Catalogue().groups))
def test_help_of_a_group_explains_every_key(group: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Planted bugs: a key without a meaning; the keys of a variant's base lost."""
    catalogue = Catalogue()
    assert run(["--help", group]) == 0
    text = capsys.readouterr().out
    for choice in catalogue.choices(group):
        assert f"{choice}  {catalogue.help_line(group, choice)}" in text
        if group not in ("experiment", "debug"):
            explained = meanings(catalogue, group, choice)
            assert not [key for key in choice_keys(catalogue, group, choice) if not explained.get(key)], choice
    assert "where" in choice_keys(catalogue, "method", "mc_dropout"), "a method's key is not an experiment's block"


def test_help_of_one_choice_of_the_settings_and_of_nothing_known(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["--help", "method=laplace_kfac"]) == 0
    text = capsys.readouterr().out
    assert "method.structure=kfac" in text and "method.rank=100" in text
    assert run(["--help=settings"]) == 0 and "time_limit=null" in capsys.readouterr().out
    assert run(["--help", "methd"]) == 2 and "Did you mean method?" in capsys.readouterr().err
    assert run(["--help", "method=laplac"]) == 2 and "Did you mean laplace" in capsys.readouterr().err
