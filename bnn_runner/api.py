"""The Python interface: runs experiments from a notebook or script, and opens finished runs.

>>> import bnn_runner
>>> settings = {"data": "gap1d", "method": "laplace", "debug": "fast", "metric": ["marginal"], "figures": False}
>>> run = bnn_runner.run(settings, quiet=True)
>>> run.task.spec.kind, len(run.task.train), run.network.num_parameters
('regression', 135, 2701)
>>> run.scores.query("metric == 'marginal_loglik' and split == 'test'")[["unit", "n"]].values.tolist()
[['nats per point', 100]]

A draw is one function, the same at every point. By default, draws and evaluation are those that the run scored:

>>> draws = run.draws(5)
>>> draws(run.task.test.inputs).shape
torch.Size([5, 100, 1])
>>> run.evaluation.test.loglik.shape
torch.Size([8, 100])

Predictions take inputs and return targets in their original units:

>>> table = run.predict([[0.0], [2.5]])
>>> list(table.columns)
['mean', 'sd', 'aleatoric_sd', 'epistemic_sd', 'lower_95', 'upper_95']
>>> bool(table.epistemic_sd[0] > table.epistemic_sd[1])  # 0 is in the gap, 2.5 is among the data
True

`load` opens a finished run by its folder. It reads the posterior if save_posterior=true has saved it, else fits it
again:

>>> again = bnn_runner.load(run.folder, quiet=True)
>>> again.predict([[0.0], [2.5]]).equals(table), again.posterior_source
(True, 'fitted again')

`sweep` runs every combination of values, as `bnn-run -m` does:

>>> overrides = ["debug=fast", "figures=false", "metric=[rmse]", "method=map,laplace", "seed=0,1"]
>>> [(r.method, r.seed, len(r.scores)) for r in bnn_runner.sweep(overrides, quiet=True)]
[('map', 0, 1), ('map', 1, 1), ('laplace', 0, 3), ('laplace', 1, 3)]

Usage errors raise `UserError`, failed runs raise `RunFailed`; neither ends the process:

>>> bnn_runner.run(["data=gap1"])
Traceback (most recent call last):
...
bnn_runner.errors.UserError: data=gap1 is unknown. Did you mean gap1d? ...

The state of the process does not change: signal handlers, threads, random states and flags are restored.
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
from bnn_runner.config.groups import RECOMMENDED, Catalogue, merge
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
_COMPOSING = threading.Lock()  # Hydra's state belongs to the whole process


def run(overrides: Overrides = (), *, config_dir: Path | str | None = None, quiet: bool = False) -> Run:
    """Runs one experiment, unless it is already finished, and opens it.

    Args:
        overrides: As on the command line, ["data=yacht"], or a mapping, {"data": "yacht"}.
        config_dir: A folder with choices of your own.
        quiet: Print nothing.

    Raises:
        UserError: For usage errors.
        RunFailed: If the run could not finish.
        KeyboardInterrupt: If it is interrupted; the same call resumes it.
    """
    [folder], allow = _run_cells(_as_list(overrides), config_dir, quiet, max_replicates=1)
    return load(folder, allow=allow, quiet=quiet)


def sweep(overrides: Overrides = (), *, config_dir: Path | str | None = None, quiet: bool = False) -> list[Run]:
    """Runs every combination of values separated by commas, and every replicate. A failed run does not stop the others.

    Args:
        overrides: As on the command line, ["seed=0,1"], or a mapping.
        config_dir: A folder with choices of your own.
        quiet: Print nothing.

    Returns:
        One run per cell.

    Raises:
        UserError: For usage errors.
        RunFailed: At the end, with the reasons of all failed runs; all others are finished by then.
        KeyboardInterrupt: If it is interrupted; the same call resumes it.
    """
    checked = check(_as_list(overrides), [] if config_dir is None else [Path(config_dir)], multirun=True)
    unknown = [o.text for o in checked.overrides if o.sweep and UNKNOWN in o.values]
    if unknown:
        raise UserError(f"The values of {', '.join(unknown)} must be written out, as in seed=0,1,2.")
    options: list[list[Override]] = [[o.single(v) for v in o.values] if o.sweep else [o] for o in checked.overrides]
    runs, failures = [], []
    for combination in itertools.product(*options):
        one_run = [render(o) for o in combination]
        try:
            folders, allow = _run_cells(one_run, config_dir, quiet)
            runs += [load(folder, allow=allow, quiet=quiet) for folder in folders]
        except RunFailed as error:
            failures.append(f"{' '.join(one_run)}: {error}")
    if failures:
        raise RunFailed("\n".join(failures))
    return runs


def _as_list(overrides: Overrides) -> list[str]:
    if isinstance(overrides, str):
        raise UserError(f"overrides must be a list of strings or a mapping; got the string {overrides!r}.")
    if isinstance(overrides, Mapping):
        return [f"{key}={to_text(value)}" for key, value in overrides.items()]
    return list(overrides)


def _run_cells(
    overrides: Sequence[str], config_dir: Path | str | None, quiet: bool, max_replicates: int | None = None
) -> tuple[list[Path], tuple[str, ...]]:
    """Runs one experiment. Returns the folders of its cells, and the packages that the caller trusts."""
    with _COMPOSING:
        experiment = load_experiment(overrides, config_dir)
    if max_replicates is not None and experiment.settings.replicates > max_replicates:
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
    """Opens a finished run by its folder, on any machine that has its data (not needed if its posterior is saved).

    Args:
        folder: The folder of the cell.
        allow: Packages whose classes may be loaded, in addition to bnn_runner. The run's own files name the packages
            that it used; they are not trusted automatically.
        device: cpu, cuda, mps or auto.
        data_dir: Where the data are now, if they have moved.
        cache_dir: Where the trained networks are now, if they have moved.
        quiet: Print nothing.

    Raises:
        UserError: If the folder contains no finished run, or the run uses classes that are not trusted.
    """
    folder = Path(folder).absolute()
    facts = _facts(folder)
    places = facts.get("places") or {}
    config = OmegaConf.to_container(OmegaConf.load(folder / "config.yaml"))
    assert isinstance(config, dict)
    untrusted = [str(name) for name in config.get("allow") or () if name not in allow]
    if untrusted:
        raise UserError(
            f"The run in {folder} uses classes of {', '.join(untrusted)}, which are not trusted. To trust them, "
            f"pass --allow {','.join(untrusted)}, or load(..., allow={untrusted})."
        )
    output_dir = folder.parents[4]
    catalogue = Catalogue()
    config = merge(catalogue.base, {str(k): v for k, v in config.items()})
    config["data"] = merge(_data_defaults(catalogue, str(facts["choices"]["data"])), config["data"])
    recorded_cache = places.get("cache_dir") if config.get("cache_dir") else None
    recorded_data = places.get("data_dir")
    data = data_dir or (recorded_data if recorded_data is not None and Path(recorded_data).is_dir() else None)
    config |= {
        "output_dir": str(output_dir),
        "cache_dir": str(cache_dir or recorded_cache or output_dir / "cache"),
        "data_dir": None if data is None else str(data),
        "device": device,
        "allow": list(allow),
    }
    config_dir = places.get("config_dir")
    if config_dir is not None and allow:
        add_to_import_path(Path(config_dir))
    # The configuration has the digests of pretrained networks: they are read from the cache, not from their files.
    run = RunConfig(config, facts["choices"], config_dir=None if config_dir is None else Path(config_dir))
    computes_on = pick_device(device)
    saved_task = posterior_store.load_task(folder, computes_on, allow)
    experiment = build_experiment(run, spec=None if saved_task is None else saved_task.spec)
    return Run(folder, facts, experiment, computes_on, Console(io.StringIO()) if quiet else Console(), saved_task)


def _data_defaults(catalogue: Catalogue, choice: str) -> dict[str, Any]:
    """The keys of a data set, for runs of earlier versions, which may lack some; {} for a choice of the user's own."""
    if catalogue.problem_with("data", choice) is not None:
        return {}
    return {key: value for key, value in catalogue.load("data", choice).items() if key not in ("_target_", RECOMMENDED)}


def _facts(folder: Path) -> dict[str, Any]:
    """Reads cell.json of a finished run. Raises `UserError` if it is missing or the run is not finished."""
    try:
        facts: dict[str, Any] = json.loads((folder / "cell.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        raise UserError(
            f"{folder} must be the folder of a run, as printed after 'cell'; it has no readable cell.json."
        ) from None
    if not (folder / "DONE").is_file():
        status = next((n for n in ("FAILED", "INTERRUPTED") if (folder / n).is_file()), None)
        reason = (folder / status).read_text(encoding="utf-8").splitlines()[0] if status else "it has not finished"
        command = folder / "command.txt"
        advice = f" To finish it, run: {command.read_text(encoding='utf-8').strip()}" if command.is_file() else ""
        raise UserError(
            f"The run in {folder} is not finished ({(status or 'no DONE file').lower()}: {reason}).{advice}"
        )
    return facts


@dataclass(frozen=True)
class Run:
    """A finished run. Its parts are read when they are first used.

    Attributes:
        folder: The folder of the cell.
        facts: Content of cell.json.
        experiment: The experiment, with the objects of the configuration.
        device: Where predictions are computed.
        console: Where messages go.
        saved_task: What a saved posterior needs for predictions, so that they do not require the data.
    """

    folder: Path
    facts: Mapping[str, Any]
    experiment: Experiment
    device: torch.device
    console: Console
    saved_task: Task | None = None

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
        """The scores (metrics.csv): one row each, with standard error, n, split, status and note."""
        import pandas as pd

        return pd.read_csv(self.folder / "metrics.csv", keep_default_na=False, na_values=["nan"])

    @cached_property
    def evaluation(self) -> Evaluation:
        """Log-likelihoods of every draw and predictive means or probabilities, for test, val and every other set."""
        return evaluation_store.load(self.folder)

    @cached_property
    def _session(self) -> Session:
        return Session(self.device, torch.get_num_threads(), self.console, self.console.progress(), StopRequest())

    @cached_property
    def _cell_run(self) -> CellRun:
        with torch.inference_mode(False):
            cell_run = runner.prepare(self.experiment, self._session)
        if cell_run.task.fingerprint != self.facts["fingerprint"]:
            raise UserError(
                f"The data of {self.folder} have changed since it was run (their fingerprint differs). Run it again, "
                "or pass data_dir= with the original data."
            )
        return cell_run

    @cached_property
    def _saved_cell_run(self) -> CellRun:
        return runner.prepare(self.experiment, self._session, self.saved_task)

    @property
    def task(self) -> Task:
        """The data of the run."""
        return self._cell_run.task

    @cached_property
    def networks(self) -> tuple[Network, ...]:
        """The trained networks, from the cache. Raises `UserError` if one is missing."""
        provider = runner.network_provider(self.experiment, self._session)
        trainings = self._cell_run.trainings
        with torch.inference_mode(False):  # tensors of inference mode cannot be differentiated in a later fit
            networks = tuple(n for t in trainings if (n := provider.load(t)) is not None)
        if len(networks) != len(trainings):
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
        """How `posterior` is obtained: 'saved' (read from the run) or 'fitted again' (to the cached networks)."""
        return "saved" if posterior_store.is_saved(self.folder) else "fitted again"

    @cached_property
    def posterior(self) -> Posterior:
        """The fitted posterior: read if the run saved it, else fitted again to the cached networks."""
        if self.posterior_source == "saved":
            cell_run = self._cell_run if self.saved_task is None else self._saved_cell_run
            module = runner.network_provider(self.experiment, self._session).skeleton(cell_run.trainings[0])
            allow = self.experiment.settings.allow
            return posterior_store.load(self.folder, cell_run.fingerprints(), module, self.device, allow)
        cell_run, networks = self._cell_run, self.networks
        self.console.say("the posterior was not saved (save_posterior=true saves it): fitting it again")
        hyper, schedule = self.experiment.hyper, self.experiment.schedule
        fixed = self.experiment.noise.noise == "fixed"
        augment = self.experiment.augment
        context = FitContext(
            self.seed, hyper, schedule, progress=self._session.progress, augment=augment, noise_fixed=fixed
        )
        # A posterior may be fitted again within a caller's `torch.no_grad()` or `torch.inference_mode()`.
        with torch.inference_mode(False), torch.enable_grad():
            return self.experiment.method.fit(cell_run.task, networks, context)

    @property
    def _posterior_seed(self) -> int:
        return derive_seed(self.seed, "posterior")

    def draws(self, num_draws: int | None = None, seed: int | None = None) -> Draws:
        """Draws functions from the posterior: network inputs [B, ...] -> outputs [S, B, K].

        Args:
            num_draws: Number of draws S; that of the run by default.
            seed: Seed of the draws; by default that of the run, which gives the draws that were scored.
        """
        count = self.experiment.settings.eval.num_draws if num_draws is None else num_draws
        return self.posterior.draws(count, self._posterior_seed if seed is None else seed)

    def predict(self, x: Any, num_draws: int | None = None, level: float = 0.95) -> pd.DataFrame:
        """Returns predictions for new points, one row each, in original units (see `Predictor.table` for the columns).

        Args:
            x: A table with the training columns by name, or numbers [M, D]; for images uint8 pixels [M, C, H, W],
                [M, H, W, C] or [M, H, W].
            num_draws: Number of draws; that of the run by default.
            level: Probability of the central interval.

        Raises:
            UserError: If columns or shapes do not fit.
        """
        predictor = self.predictor(num_draws)
        points = from_values(x, predictor.task)
        table = points.all_rows(predictor.table(points.points, level))
        return table.set_axis(x.index) if hasattr(x, "iloc") else table

    def predictor(self, num_draws: int | None = None) -> Predictor:
        """Returns the posterior with everything that predictions need.

        Args:
            num_draws: Number of draws; that of the run by default.
        """
        settings = self.experiment.settings.eval
        return Predictor(
            task=self.saved_task or self.task,
            posterior=self.posterior,
            predictive=self.experiment.method.predictive,
            num_draws=settings.num_draws if num_draws is None else num_draws,
            seed=self._posterior_seed,
            batch_size=settings.batch_size,
            temperature=self.evaluation.temperature,
        )
