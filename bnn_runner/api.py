"""The runner from Python: run an experiment from a notebook, and open a finished run again.

>>> import bnn_runner
>>> words = {"data": "gap1d", "method": "laplace", "debug": "fast", "metric": ["marginal"], "figures": False}
>>> run = bnn_runner.run(words, quiet=True)
>>> run.task.spec.kind, len(run.task.train), run.network.num_parameters
('regression', 135, 2701)
>>> run.scores.query("metric == 'marginal_loglik' and split == 'test'")[["unit", "n"]].values.tolist()
[['nats per point', 100]]

A draw is one function, the same at every point; draws and evaluation are those of the run:

>>> draws = run.draws(5)
>>> draws(run.task.test.inputs).shape
torch.Size([5, 100, 1])
>>> run.evaluation.test.loglik.shape
torch.Size([8, 100])

Predictions take inputs in their original units and give targets in theirs:

>>> table = run.predict([[0.0], [2.5]])
>>> list(table.columns)
['mean', 'sd', 'aleatoric_sd', 'epistemic_sd', 'lower_95', 'upper_95']
>>> bool(table.epistemic_sd[0] > table.epistemic_sd[1])  # 0 lies in the gap, 2.5 among the data
True

A run is opened again by its folder; the posterior is read, where save_posterior=true left it, or fitted again:

>>> again = bnn_runner.load(run.folder, quiet=True)
>>> again.predict([[0.0], [2.5]]).equals(table), again.posterior_source
(True, 'fitted again')

`sweep` runs every combination of values, as `bnn-run -m` does:

>>> words = ["debug=fast", "figures=false", "metric=[rmse]", "method=map,laplace", "seed=0,1"]
>>> [(r.method, r.seed, len(r.scores)) for r in bnn_runner.sweep(words, quiet=True)]
[('map', 0, 1), ('map', 1, 1), ('laplace', 0, 1), ('laplace', 1, 1)]

Mistakes are `UserError`, runs that cannot go on `RunFailed`, and neither ends the process:

>>> bnn_runner.run(["data=gap1"])
Traceback (most recent call last):
...
bnn_runner.errors.UserError: data=gap1 is unknown. Did you mean gap1d? ...

Nothing of the process is changed: signal handlers, threads, random states and flags are left as found.
"""

from __future__ import annotations

import io
import itertools
import json
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from omegaconf import OmegaConf

from bnn_runner import runner
from bnn_runner.base import Draws, FitContext, Network, Posterior
from bnn_runner.config.groups import Catalogue, merge
from bnn_runner.config.overrides import UNKNOWN, Override, render, to_text
from bnn_runner.config.run_config import RunConfig
from bnn_runner.config.validate import check
from bnn_runner.errors import Interrupted, RunFailed, UserError
from bnn_runner.evaluation import io as evaluation_store
from bnn_runner.experiment import Experiment, build_experiment, load_experiment
from bnn_runner.experiment.components import add_to_import_path
from bnn_runner.posteriors import io as posterior_store
from bnn_runner.rng import derive_seed
from bnn_runner.runs.new_points import from_values
from bnn_runner.runs.predictor import Predictor
from bnn_runner.runs.session import CellRun, Session
from bnn_runner.runtime.console import Console
from bnn_runner.runtime.devices import pick_device
from bnn_runner.runtime.signals import StopRequest
from bnn_runner.scoring import Evaluation
from bnn_runner.tasks import Task

if TYPE_CHECKING:
    import pandas as pd

__all__ = ["Run", "load", "run", "sweep"]

Overrides = Sequence[str] | Mapping[str, Any]
_COMPOSING = threading.Lock()  # Hydra composes in a state of the whole process


def run(overrides: Overrides = (), *, config_dir: Path | str | None = None, quiet: bool = False) -> Run:
    """Run one experiment (or find it finished) and open it. `overrides` as typed: ["data=yacht"] or {"data": "yacht"}.

    `config_dir` holds choices of your own; `quiet` prints nothing. Raises `UserError` for mistakes,
    `RunFailed` where the run cannot go on, `KeyboardInterrupt` when it is stopped (the same call goes on from there).
    """
    [found], allow = _cells(_words(overrides), config_dir, quiet, most=1)
    return load(found, allow=allow, quiet=quiet)


def sweep(overrides: Overrides = (), *, config_dir: Path | str | None = None, quiet: bool = False) -> list[Run]:
    """Run every combination of values with commas, and every replicate. A failed one stops no other.

    Raises `RunFailed` at the end with the reasons of those that failed; the others are finished by then.
    """
    words = _words(overrides)
    checked = check(words, [] if config_dir is None else [Path(config_dir)], multirun=True)
    vague = [o.text for o in checked.overrides if o.sweep and UNKNOWN in o.values]
    if vague:
        raise UserError(f"The values of {', '.join(vague)} must be written out, as in seed=0,1,2.")
    options: list[list[Override]] = [[o.single(v) for v in o.values] if o.sweep else [o] for o in checked.overrides]
    runs, failures = [], []
    for combination in itertools.product(*options):
        chosen = [render(o) for o in combination]
        try:
            found, allow = _cells(chosen, config_dir, quiet)
            runs += [load(f, allow=allow, quiet=quiet) for f in found]
        except RunFailed as error:
            failures.append(f"{' '.join(chosen)}: {error}")
    if failures:
        raise RunFailed("\n".join(failures))
    return runs


def _words(overrides: Overrides) -> list[str]:
    if isinstance(overrides, str):
        raise UserError(f"overrides must be a list of strings or a mapping; got the string {overrides!r}.")
    if isinstance(overrides, Mapping):
        return [f"{key}={to_text(value)}" for key, value in overrides.items()]
    return list(overrides)


def _cells(
    words: Sequence[str], config_dir: Path | str | None, quiet: bool, most: int | None = None
) -> tuple[list[Path], tuple[str, ...]]:
    """Run one experiment; the folders of its cells, and the packages that the caller trusts."""
    with _COMPOSING:
        experiment = load_experiment(words, config_dir)
    if most is not None and experiment.settings.replicates > most:
        raise UserError(
            f"bnn_runner.run requires replicates=1; got {experiment.settings.replicates}. Use "
            "bnn_runner.sweep, which returns a list."
        )
    try:
        outcome = runner.run(experiment, Console(io.StringIO()) if quiet else Console())
    except Interrupted as error:
        raise KeyboardInterrupt(str(error)) from None
    if outcome.status == "failed":
        raise RunFailed(outcome.message)
    return list(outcome.cells), experiment.settings.allow


def load(
    folder: Path | str,
    *,
    allow: Sequence[str] = (),
    device: str = "auto",
    data_dir: Path | str | None = None,
    cache_dir: Path | str | None = None,
    quiet: bool = False,
) -> Run:
    """Open a finished run by its folder, on any machine that has its data.

    `data_dir` and `cache_dir` are where data and trained networks lie now, if they have moved. `allow` names the
    packages beside bnn_runner whose classes may be made: what the run's own files say of that is not trusted.
    Raises `UserError` for a folder that holds no finished run, and for one with classes that are not trusted.
    """
    folder = Path(folder).absolute()
    facts = _facts(folder)
    places = facts.get("places") or {}
    config = OmegaConf.to_container(OmegaConf.load(folder / "config.yaml"))
    assert isinstance(config, dict)
    wanted = [str(name) for name in config.get("allow") or () if name not in allow]
    if wanted:
        raise UserError(
            f"The run in {folder} uses classes of {', '.join(wanted)}, which are not trusted. To trust them, "
            f"pass --allow {','.join(wanted)}, or load(..., allow={wanted})."
        )
    output_dir = folder.parents[4]
    config = merge(Catalogue().base, {str(k): v for k, v in config.items()})
    recorded = places.get("cache_dir") if config.get("cache_dir") else None
    kept = places.get("data_dir")
    data = data_dir or (kept if kept is not None and Path(kept).is_dir() else None)
    config |= {
        "output_dir": str(output_dir),
        "cache_dir": str(cache_dir or recorded or output_dir / "cache"),
        "data_dir": None if data is None else str(data),
        "device": device,
        "allow": list(allow),
    }
    own = places.get("config_dir")
    if own is not None and allow:
        add_to_import_path(Path(own))
    # The configuration has the digests of pretrained networks: they are read from the cache, not from their files.
    run = RunConfig(config, facts["choices"], config_dir=None if own is None else Path(own))
    experiment = build_experiment(run)
    return Run(folder, facts, experiment, pick_device(device), Console(io.StringIO()) if quiet else Console())


def _facts(folder: Path) -> dict[str, Any]:
    """cell.json of a finished run."""
    try:
        facts: dict[str, Any] = json.loads((folder / "cell.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        raise UserError(
            f"{folder} must be the folder of a run, as printed after 'cell'; it has no readable cell.json."
        ) from None
    if not (folder / "DONE").is_file():
        ended = next((n for n in ("FAILED", "INTERRUPTED") if (folder / n).is_file()), None)
        reason = (folder / ended).read_text(encoding="utf-8").splitlines()[0] if ended else "it has not finished"
        command = folder / "command.txt"
        again = f" To finish it, run: {command.read_text(encoding='utf-8').strip()}" if command.is_file() else ""
        raise UserError(f"The run in {folder} is not finished ({(ended or 'no DONE file').lower()}: {reason}).{again}")
    return facts


@dataclass(frozen=True)
class Run:
    """A finished run. Its parts are read when they are first asked for."""

    folder: Path
    facts: Mapping[str, Any]
    experiment: Experiment
    device: torch.device
    console: Console

    def __repr__(self) -> str:
        return f"Run({self.data}, {self.model}, {self.method}, seed {self.seed}: {self.folder})"

    @property
    def data(self) -> str:
        return str(self.facts["data"])

    @property
    def model(self) -> str:
        return str(self.facts["model"])

    @property
    def method(self) -> str:
        return str(self.facts["method"])

    @property
    def seed(self) -> int:
        return int(self.facts["seed"])

    @property
    def config(self) -> dict[str, Any]:
        """The resolved configuration."""
        return self.experiment.config

    @cached_property
    def scores(self) -> pd.DataFrame:
        """metrics.csv: a row each score, with its standard error, n, split, status and note."""
        import pandas as pd

        return pd.read_csv(self.folder / "metrics.csv", keep_default_na=False, na_values=["nan"])

    @cached_property
    def evaluation(self) -> Evaluation:
        """Log-likelihoods of every draw, predictive means or probabilities, for test, val and every other set."""
        return evaluation_store.load(self.folder)

    @cached_property
    def _session(self) -> Session:
        return Session(self.device, torch.get_num_threads(), self.console, self.console.progress(), StopRequest())

    @cached_property
    def _cell_run(self) -> CellRun:
        cell_run = runner.prepare(self.experiment, self._session)
        if cell_run.task.fingerprint != self.facts["fingerprint"]:
            raise UserError(
                f"The data of {self.folder} have changed since it was run (another fingerprint). Run it again, or "
                "pass data_dir= with the original data."
            )
        return cell_run

    @property
    def task(self) -> Task:
        """The data, as the run had them."""
        return self._cell_run.task

    @cached_property
    def networks(self) -> tuple[Network, ...]:
        """The trained networks, out of the cache. Raises `UserError` where they are gone."""
        plan = runner.network_provider(self.experiment, self._session)
        found = [plan.load(training) for training in self._cell_run.trainings]
        networks = tuple(n for n in found if n is not None)
        if len(networks) != len(found):
            raise UserError(
                f"A trained network of {self.folder} is missing from {self.experiment.settings.cache_path}. Pass "
                f"cache_dir=, or run it again: {(self.folder / 'command.txt').read_text(encoding='utf-8').strip()}"
            )
        return networks

    @property
    def network(self) -> Network:
        """The first trained network."""
        return self.networks[0]

    @property
    def posterior_source(self) -> str:
        """Where the posterior comes from: 'saved' with the run, or 'fitted again' to the cached networks."""
        return "saved" if posterior_store.is_saved(self.folder) else "fitted again"

    @cached_property
    def posterior(self) -> Posterior:
        """The fitted posterior: read where the run saved it, else fitted again to the cached networks."""
        cell_run = self._cell_run
        if self.posterior_source == "saved":
            module = runner.network_provider(self.experiment, self._session).skeleton(cell_run.trainings[0])
            allow = self.experiment.settings.allow
            return posterior_store.load(self.folder, cell_run.fingerprints(), module, self.device, allow)
        networks = self.networks
        self.console.say("the posterior was not saved (save_posterior=true saves it): fitting it again")
        hyper, schedule = self.experiment.hyper, self.experiment.schedule
        fixed = self.experiment.noise.noise == "fixed"
        context = FitContext(self.seed, hyper, schedule, progress=self._session.progress, noise_fixed=fixed)
        return self.experiment.method.fit(cell_run.task, networks, context)

    @property
    def _posterior_seed(self) -> int:
        return derive_seed(self.seed, "posterior")

    def draws(self, num_draws: int | None = None, seed: int | None = None) -> Draws:
        """Functions from the posterior, network inputs [B, ...] to outputs [S, B, K]; the scored ones by default."""
        count = self.experiment.settings.eval.num_draws if num_draws is None else num_draws
        return self.posterior.draws(count, self._posterior_seed if seed is None else seed)

    def predict(self, x: Any, num_draws: int | None = None, level: float = 0.95) -> pd.DataFrame:
        """Predictions for new points in their original units, one row each (see `Predictor.table`).

        `x` is a table with the training columns by name, or numbers [M, D]; for images uint8 pixels
        [M, C, H, W], [M, H, W, C] or [M, H, W]. Raises `UserError` for columns or shapes that do not fit.
        """
        return self.predictor(num_draws).table(from_values(x, self.task), level)

    def predictor(self, num_draws: int | None = None) -> Predictor:
        """The posterior with all that predictions need."""
        settings = self.experiment.settings.eval
        return Predictor(
            task=self.task,
            posterior=self.posterior,
            predictive=self.experiment.method.predictive,
            num_draws=settings.num_draws if num_draws is None else num_draws,
            seed=self._posterior_seed,
            batch_size=settings.batch_size,
            temperature=self.evaluation.temperature,
        )
