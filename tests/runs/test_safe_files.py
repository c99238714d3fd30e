"""Files that come with results run no code: neither what they name as classes nor what a pickle in them would call."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import pytest
import torch

import bnn_runner
from bnn_runner.api import Run
from bnn_runner.cli.predict import main as predict
from bnn_runner.errors import UserError
from bnn_runner.mcmc.checkpoint import Checkpoint
from bnn_runner.posteriors.swag_moments import _load

WORDS = [
    "data=gap1d", "data.num_train=40", "data.num_test=16", "model.hidden=[5]", "threads=1", "device=cpu",
    "schedule.epochs=3", "eval.num_draws=8", "figures=false", "metric=[marginal]", "time_limit=null",
]  # fmt: skip


@pytest.fixture
def finished(tmp_path: Path) -> Run:
    return bnn_runner.run([*WORDS, "method=map", f"output_dir={tmp_path / 'out'}"], quiet=True)


class Bomb:
    """What unpickles by making a folder."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self):
        return os.mkdir, (str(self.mark),)


@pytest.mark.parametrize(
    ("target", "allow", "told"),
    [
        ("os.system", "", "not trusted"),
        ("os.system", "allow: [os]", "which are not trusted"),
        ("trap.Method", "allow: [trap]", "which are not trusted"),
        ("trap.Method", "", "not trusted"),
        ("bnn_runner.runtime.files.write_text", "", "bnn_runner.runtime.files.write_text"),
    ],
)
def test_a_configuration_in_a_results_folder_is_not_believed(
    finished: Run, tmp_path: Path, target: str, allow: str, told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Planted bug: the packages to trust, and where to find them, read from the run's own files."""
    mark = tmp_path / "mark"
    (tmp_path / "theirs").mkdir()
    (tmp_path / "theirs" / "trap.py").write_text(f"import os\nos.mkdir({str(mark)!r})\n")
    path = finished.folder / "config.yaml"
    text = path.read_text().replace("bnn_runner.methods.map.MAP", target)
    assert target in text
    path.write_text(text.replace("allow: []", allow or "allow: []") + f"command: mkdir {mark}\n")
    facts = json.loads((finished.folder / "cell.json").read_text())
    facts["places"]["config_dir"] = str(tmp_path / "theirs")
    (finished.folder / "cell.json").write_text(json.dumps(facts))
    with pytest.raises(UserError, match=told):
        bnn_runner.load(finished.folder, quiet=True)
    (tmp_path / "x.csv").write_text("x\n0.1\n")
    assert predict([str(finished.folder), "--data", str(tmp_path / "x.csv")]) == 2
    assert told in capsys.readouterr().err
    assert not mark.exists() and "trap" not in sys.modules and str(tmp_path / "theirs") not in sys.path


def test_no_pickle_is_run(tmp_path: Path) -> None:
    """Checkpoints of training and fits, and weights trained elsewhere. Planted bug: weights_only=False."""
    mark, bomb = tmp_path / "mark", tmp_path / "bomb.pt"
    torch.save({"identity": "me", "moved": Bomb(mark)}, bomb)
    cpu = torch.device("cpu")
    assert Checkpoint(bomb, "me").load(cpu) is None and _load(bomb, cpu) == {}
    with pytest.raises(UserError, match=r"model\.weights"):
        bnn_runner.run([*WORDS, "method=map", f"model.weights={bomb}", f"output_dir={tmp_path / 'o'}"], quiet=True)
    # One in the place of every file that a run goes on from.
    words = [*WORDS, "method=bbb", f"output_dir={tmp_path / 'out'}"]
    first = bnn_runner.run(words, quiet=True)
    before = (first.folder / "metrics.csv").read_bytes()
    network = next((tmp_path / "out" / "cache" / "networks").glob("*.safetensors"))
    for path in (network, first.folder / "fit.partial"):
        path.write_bytes(bomb.read_bytes())
    (first.folder / "DONE").unlink()
    again = bnn_runner.run(words, quiet=True)
    assert (again.folder / "metrics.csv").read_bytes() == before and not mark.exists()
