"""The plan of a sweep: each job's cells and their status, what is left to run, and which jobs run together as lanes.

Nothing is trained and nothing is downloaded here. A job with an error in its settings stays in the plan, with the
reasons.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from bnn_runner.config.groups import flatten
from bnn_runner.config.keys import digest, metrics_digest, select
from bnn_runner.config.run_config import RunConfig
from bnn_runner.errors import UserError
from bnn_runner.runs.status import facts_of, set_status, status_of
from bnn_runner.sweeps.plan_cache import Entry, Memory, state_of

if TYPE_CHECKING:
    from bnn_runner.experiment import Experiment

JobStatus = Literal["done", "failed", "interrupted", "open", "usage error"]
LANE_KEYS = ("seed", "data.split")
"""Jobs that differ in nothing else may train as lanes."""


@dataclass(frozen=True)
class Job:
    """One point of the sweep.

    `trainings` are digests of what shapes each network that it trains; jobs of one `lanes` text train faster at once.
    `config` is its resolved configuration (`RunConfig.to_text`), where it had to be looked at in full.
    """

    number: int
    overrides: tuple[str, ...]
    status: JobStatus = "open"
    cells: tuple[Path, ...] = ()
    problems: tuple[str, ...] = ()
    trainings: frozenset[str] = frozenset()
    lanes: str | None = None
    config: str | None = None

    @property
    def shown(self) -> str:
        """The overrides as a person typed them."""
        return " ".join(text.lstrip("+") for text in self.overrides) or "the default"


@dataclass(frozen=True)
class Plan:
    """Every job, and those that are to run in groups: of one, or of several that train as lanes."""

    jobs: tuple[Job, ...]
    groups: tuple[tuple[Job, ...], ...]
    retry_failed: bool

    def summary_lines(self) -> list[str]:
        """The plan in lines for a person."""
        running = [job for group in self.groups for job in group]
        cells = {c for job in self.jobs for c in job.cells}
        lines = [f"sweep: {_count(len(self.jobs), 'job')}, {_count(len(cells), 'cell')}; {self._counts()}"]
        needed = sum(len(job.trainings) for job in running)
        different = len({t for job in running for t in job.trainings})
        if needed > different:
            lines.append(f"trainings: {_count(needed, 'network')} needed, {different} of them different")
        for group in self.groups:
            if len(group) > 1:
                lines.append(f"lanes: {len(group)} jobs run as one, {group[0].shown} ... {group[-1].shown}")
        return lines

    def _counts(self) -> str:
        counts = Counter(job.status for job in self.jobs)
        parts = [f"{counts['done']} done", f"{sum(map(len, self.groups))} to run"]
        if counts["failed"]:
            parts.append(
                f"{counts['failed']} failed before ({'will run again' if self.retry_failed else 'left alone'})"
            )
        if counts["interrupted"]:
            parts.append(f"{counts['interrupted']} interrupted before (will resume)")
        if counts["usage error"]:
            parts.append(f"{counts['usage error']} with errors")
        return ", ".join(parts)


Look = Callable[[Mapping[int, Sequence[str]], Path | None, Path, Memory, bool], dict[int, Job]]


def make_plan(
    points: Sequence[Sequence[str]],
    config_dir: Path | None,
    start: Path,
    memory: Memory,
    retry_failed: bool,
    max_lanes: int,
    look_only: bool = False,
    look: Look | None = None,
) -> Plan:
    """Plan the jobs that have these overrides; `look_only` leaves the disk as it is.

    What `memory` does not vouch for is looked into in full, by `look` (`look_into` here, or in another process).
    """
    jobs: dict[int, Job] = {}
    for number, point in enumerate(points):
        if (entry := memory.recall(point)) is not None:
            jobs[number] = Job(number, tuple(point), "done", tuple(map(Path, entry.cells)))
    if rest := {number: point for number, point in enumerate(points) if number not in jobs}:
        jobs |= (look or look_into)(rest, config_dir, start, memory, look_only)
    ordered = tuple(jobs[number] for number in range(len(points)))
    runs = [j for j in ordered if j.status in ("open", "interrupted") or (retry_failed and j.status == "failed")]
    return Plan(ordered, _groups(runs, max_lanes), retry_failed)


def look_into(
    points: Mapping[int, Sequence[str]], config_dir: Path | None, start: Path, memory: Memory, look_only: bool
) -> dict[int, Job]:
    """The jobs of numbered points, each composed, built and compared with the cells on disk.

    Cells whose data have changed since are opened again, and what is found out is kept in `memory`.
    """
    from bnn_runner.experiment import build_experiment

    jobs: dict[int, Job] = {}
    loader = Loader(config_dir, start)
    runs: dict[int, RunConfig] = {}
    experiments: dict[int, Experiment] = {}
    last: Experiment | None = None
    for number, point in points.items():
        try:
            runs[number] = loader.load(point)
            last = experiments[number] = build_experiment(runs[number], last)
        except UserError as error:
            jobs[number] = Job(number, tuple(point), "usage error", problems=error.problems)
    changed = _changed_data(experiments)
    for number, experiment in experiments.items():
        jobs[number] = _job(number, runs[number], experiment, changed)
        if not look_only:
            for cell in changed.intersection(jobs[number].cells):
                set_status(cell, "open", "")
            if not (experiment.pretrained or experiment.settings.force or experiment.settings.prepare):
                memory.keep(points[number], _entry(experiment, jobs[number]))
    return jobs


@dataclass
class Loader:
    """Resolved configurations from overrides; of jobs that differ in their seed only two are composed by Hydra.

    The second is compared with the first: whatever else depends on the seed is composed for every job.
    """

    config_dir: Path | None
    start: Path
    _models: dict[tuple[str, ...], tuple[RunConfig, bool]] = field(default_factory=dict)

    def load(self, overrides: Sequence[str]) -> RunConfig:
        """Raises `UserError` with every problem."""
        from bnn_runner.experiment import resolve_run

        seeds = [text for text in overrides if text.startswith("seed=") and text[5:].isdecimal()]
        others = tuple(text for text in overrides if text not in seeds)
        first, agrees = self._models.get(others, (None, False))
        if len(seeds) == 1 and first is not None and agrees:
            return replace(first.changed({"seed": int(seeds[0][5:])}), typed=tuple(overrides))
        run = resolve_run(overrides, self.config_dir, self.start)
        if len(seeds) == 1:
            same = first is not None and first.changed({"seed": run.get("seed")}).tree == run.tree
            self._models[others] = (run, same)
        return run


def _cells(experiment: Experiment) -> tuple[Path, ...]:
    from bnn_runner.runs.cell import cell_of

    return tuple(cell_of(experiment.one_seed(seed)).folder for seed in experiment.seeds)


def _job(number: int, run: RunConfig, experiment: Experiment, changed: set[Path]) -> Job:
    cells = _cells(experiment)
    needed = [spec for spec in experiment.method.needs() if spec.trained and not experiment.pretrained]
    shaping = select(experiment.config, "training")
    if experiment.training_rule is not None:
        shaping |= {k: v for k, v in flatten(experiment.config).items() if k.startswith("hyper.")}
    trainings = {
        digest([shaping | {"seed": seed}, spec.member, list(spec.identity)])
        for seed in experiment.seeds
        for spec in needed
    }
    status: JobStatus = "open"
    statuses = {"open" if c in changed else status_of(c) for c in cells}
    if not experiment.settings.force and not experiment.settings.prepare:
        if statuses == {"done"}:
            status = "done" if _entry_holds(experiment, cells) else "open"
        else:
            status = "failed" if "failed" in statuses else "interrupted" if "interrupted" in statuses else "open"
    lanes = _lanes(experiment) if needed else None
    return Job(number, run.typed, status, cells, (), frozenset(trainings), lanes, run.to_text())


def _entry(experiment: Experiment, job: Job) -> Entry:
    files = state_of(_data_files(experiment))
    cells = [str(c) for c in job.cells]
    return Entry(cells, metrics_digest(experiment.config), experiment.settings.save_posterior, files)


def _entry_holds(experiment: Experiment, cells: tuple[Path, ...]) -> bool:
    return _entry(experiment, Job(0, (), cells=cells)).holds()


def _data_files(experiment: Experiment) -> list[str]:
    """Files and folders that the data set is read from, as far as they can be told."""
    from bnn_runner.data.sources import Published

    files = []
    if isinstance(path := experiment.config["data"].get("path"), str):
        files.append(path)
    if isinstance(experiment.data, Published):
        for source in experiment.data.sources():
            files += [str(experiment.settings.data_path / source.folder / file.name) for file in source.files]
    return files


def _changed_data(experiments: dict[int, Experiment]) -> set[Path]:
    """Finished cells of other data than there are now.

    One cell tells for all seeds of a data set, unless it does differ: then each is compared. Data that
    cannot be read now are no reason to doubt a finished cell.
    """

    def differs(experiment: Experiment, seed: int, cell: Path) -> bool:
        try:
            task = experiment.data.load(experiment.settings.data_path, seed)
        except (Exception, SystemExit):
            return False
        return facts_of(cell).get("fingerprint") != task.fingerprint

    finished: dict[str, list[tuple[Experiment, int, Path]]] = {}
    for experiment in experiments.values():
        if not experiment.settings.force:
            data = digest([experiment.config["data"], str(experiment.settings.data_path)])
            pairs = zip(experiment.seeds, _cells(experiment), strict=True)
            finished.setdefault(data, []).extend((experiment, s, c) for s, c in pairs if status_of(c) == "done")
    changed: set[Path] = set()
    for cells in finished.values():
        if cells and differs(*cells[0]):
            changed.update(cell for experiment, seed, cell in cells if differs(experiment, seed, cell))
    return changed


def _lanes(experiment: Experiment) -> str | None:
    """What a job's lane companions share with it; None where training at once is not faster, or not wanted.

    On an accelerator the training itself finds out which is faster, and lanes cost nothing where they are not.
    """
    from bnn_runner.runtime.devices import pick_device

    settings = experiment.settings
    if settings.stack == "never" or settings.prepare or settings.compile:
        return None
    try:
        on_cpu = pick_device(settings.device).type == "cpu"
        if on_cpu and settings.stack == "auto" and not _stacks(experiment):
            return None
    except Exception:  # a device or network that is not available: the job itself will say so
        return None
    return digest({k: v for k, v in flatten(experiment.config).items() if k not in LANE_KEYS})


def _stacks(experiment: Experiment) -> bool:
    """Whether the network has an implementation for many lanes of its own."""
    import torch

    from bnn_runner.rng import global_stream

    with global_stream(0, "skeleton"), torch.device("meta"):
        network: Any = experiment.model.build(experiment.noise.network_spec(experiment.data.spec()))
    return bool(getattr(network, "stacks_lanes", False))


def _groups(jobs: Sequence[Job], max_lanes: int) -> tuple[tuple[Job, ...], ...]:
    """Lane companions together, at most `max_lanes` at once, in the order of their first jobs."""
    groups: list[list[Job]] = []
    open_group: dict[str, list[Job]] = {}
    for job in jobs:
        group = open_group.get(job.lanes) if job.lanes is not None else None
        if group is None or len(group) >= max_lanes:
            group = []
            groups.append(group)
            if job.lanes is not None:
                open_group[job.lanes] = group
        group.append(job)
    return tuple(map(tuple, groups))


def _count(number: int, what: str) -> str:
    return f"{number} {what}{'' if number == 1 else 's'}"
