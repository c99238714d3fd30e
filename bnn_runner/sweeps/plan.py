"""The plan of a sweep: the cells of each job, which jobs are left to run, and which of these run together as lanes.

Planning trains nothing and downloads nothing. A job with a usage error stays in the plan, with the reasons.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from bnn_runner.config.groups import flatten
from bnn_runner.config.keys import digest, metrics_digest, select
from bnn_runner.config.overrides import as_typed
from bnn_runner.config.run_config import RunConfig
from bnn_runner.errors import UserError
from bnn_runner.runs.status import facts_of, set_status, status_of
from bnn_runner.sweeps.plan_cache import Entry, PlanCache, file_states

if TYPE_CHECKING:
    from bnn_runner.experiment import Experiment

JobStatus = Literal["done", "failed", "interrupted", "open", "usage error"]
LANE_KEYS = ("seed", "data.split")
"""Jobs that differ only in these keys may be trained as lanes."""


@dataclass(frozen=True)
class Job:
    """One point of the sweep.

    Attributes:
        number: Its number in the sweep.
        overrides: Its overrides.
        status: The status of its cells together.
        cells: Folders of its cells.
        problems: Messages for a usage error.
        trainings: One digest for each network that it trains; equal digests mean the same network.
        lanes: Jobs with the same text are trained together; None for a job that is trained alone.
        config: Its resolved configuration (`RunConfig.to_text`); None for a job that was found in the cache.
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
        """The overrides as typed, for messages."""
        return " ".join(map(as_typed, self.overrides)) or "the default"


@dataclass(frozen=True)
class Plan:
    """The plan of a sweep.

    Attributes:
        jobs: All jobs.
        groups: The jobs to run; a group of several is trained as lanes.
        retry_failed: Whether jobs that failed before run again.
    """

    jobs: tuple[Job, ...]
    groups: tuple[tuple[Job, ...], ...]
    retry_failed: bool

    def summary_lines(self) -> list[str]:
        """Returns lines for the user."""
        to_run = [job for group in self.groups for job in group]
        cells = {c for job in self.jobs for c in job.cells}
        lines = [f"sweep: {_count(len(self.jobs), 'job')}, {_count(len(cells), 'cell')}; {self._counts()}"]
        needed = sum(len(job.trainings) for job in to_run)
        different = len({t for job in to_run for t in job.trainings})
        if needed > different:
            lines.append(f"trainings: {_count(needed, 'network')} needed, {different} of them different")
        for group in self.groups:
            if len(group) > 1:
                lines.append(f"lanes: {len(group)} jobs run together, {group[0].shown} ... {group[-1].shown}")
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


Inspect = Callable[[Mapping[int, Sequence[str]], Path | None, Path, PlanCache, bool], dict[int, Job]]
"""`inspect_jobs`, or a function that calls it in another process."""


def make_plan(
    points: Sequence[Sequence[str]],
    config_dir: Path | None,
    start: Path,
    cache: PlanCache,
    retry_failed: bool,
    max_lanes: int,
    read_only: bool = False,
    inspect: Inspect | None = None,
) -> Plan:
    """Plans the jobs of a sweep.

    Args:
        points: The overrides of each job.
        config_dir: The folder given as --config-dir.
        start: The folder to which relative paths refer.
        cache: Jobs with an entry there are finished; all others are inspected.
        retry_failed: Whether failed jobs run again.
        max_lanes: Largest number of jobs that are trained together.
        read_only: Whether to leave the disk unchanged.
        inspect: Inspects jobs; `inspect_jobs` by default.
    """
    jobs: dict[int, Job] = {}
    for number, point in enumerate(points):
        if (entry := cache.get(point)) is not None:
            jobs[number] = Job(number, tuple(point), "done", tuple(map(Path, entry.cells)))
    if rest := {number: point for number, point in enumerate(points) if number not in jobs}:
        jobs |= (inspect or inspect_jobs)(rest, config_dir, start, cache, read_only)
    ordered = tuple(jobs[number] for number in range(len(points)))
    to_run = [j for j in ordered if j.status in ("open", "interrupted") or (retry_failed and j.status == "failed")]
    return Plan(ordered, _groups(to_run, max_lanes), retry_failed)


def inspect_jobs(
    points: Mapping[int, Sequence[str]], config_dir: Path | None, start: Path, cache: PlanCache, read_only: bool
) -> dict[int, Job]:
    """Composes and builds each job, and compares it with the cells on disk.

    Unless `read_only`, finished cells whose data have changed are opened again, and the results are stored in the
    cache.

    Args:
        points: Number -> overrides of a job.
        config_dir: The folder given as --config-dir.
        start: The folder to which relative paths refer.
        cache: Where results are stored.
        read_only: Whether to leave the disk unchanged.

    Returns:
        Number -> job.
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
        if not read_only:
            for cell in changed.intersection(jobs[number].cells):
                set_status(cell, "open", "")
            if not (experiment.pretrained or experiment.settings.force or experiment.settings.prepare):
                cache.put(points[number], _entry(experiment, jobs[number]))
    return jobs


@dataclass
class Loader:
    """Resolves overrides to configurations; of jobs that differ only in their seed, Hydra composes only two.

    The second is compared with the first. If they differ in more than the seed, every job is composed.
    """

    config_dir: Path | None
    start: Path
    _templates: dict[tuple[str, ...], tuple[RunConfig, bool]] = field(default_factory=dict)

    def load(self, overrides: Sequence[str]) -> RunConfig:
        """Returns the resolved configuration. Raises `UserError` with all problems."""
        from bnn_runner.experiment import resolve_run

        seeds = [text for text in overrides if text.startswith("seed=") and text[5:].isdecimal()]
        others = tuple(text for text in overrides if text not in seeds)
        first, confirmed = self._templates.get(others, (None, False))
        if len(seeds) == 1 and first is not None and confirmed:
            return replace(first.changed({"seed": int(seeds[0][5:])}), typed=tuple(overrides))
        run = resolve_run(overrides, self.config_dir, self.start)
        if len(seeds) == 1:
            same = first is not None and first.changed({"seed": run.get("seed")}).tree == run.tree
            self._templates[others] = (run, same)
        return run


def _cells(experiment: Experiment) -> tuple[Path, ...]:
    from bnn_runner.runs.cell import cell_of

    return tuple(cell_of(experiment.one_seed(seed)).folder for seed in experiment.seeds)


def _job(number: int, run: RunConfig, experiment: Experiment, changed: set[Path]) -> Job:
    cells = _cells(experiment)
    specs = [spec for spec in experiment.method.needs() if spec.trained and not experiment.pretrained]
    training_fields = select(experiment.config, "training")
    if experiment.training_rule is not None:
        training_fields |= {k: v for k, v in flatten(experiment.config).items() if k.startswith("hyper.")}
    trainings = {
        digest([training_fields | {"seed": seed}, spec.member, list(spec.identity)])
        for seed in experiment.seeds
        for spec in specs
    }
    status: JobStatus = "open"
    statuses = {"open" if c in changed else status_of(c) for c in cells}
    if not experiment.settings.force and not experiment.settings.prepare:
        if statuses == {"done"}:
            status = "done" if _entry(experiment, Job(0, (), cells=cells)).is_valid() else "open"
        else:
            status = "failed" if "failed" in statuses else "interrupted" if "interrupted" in statuses else "open"
    lanes = _lanes(experiment) if specs else None
    return Job(number, run.typed, status, cells, (), frozenset(trainings), lanes, run.to_text())


def _entry(experiment: Experiment, job: Job) -> Entry:
    files = file_states(_data_files(experiment))
    cells = [str(c) for c in job.cells]
    return Entry(cells, metrics_digest(experiment.config), experiment.settings.save_posterior, files)


def _data_files(experiment: Experiment) -> list[str]:
    """Files and folders from which the data set is read, as far as they are known."""
    from bnn_runner.data.sources import Published

    files = []
    if isinstance(path := experiment.config["data"].get("path"), str):
        files.append(path)
    if isinstance(experiment.data, Published):
        for source in experiment.data.sources():
            files += [str(experiment.settings.data_path / source.folder / file.name) for file in source.files]
    return files


def _changed_data(experiments: dict[int, Experiment]) -> set[Path]:
    """Finished cells whose data have changed since.

    One cell is checked for all seeds of a data set; if its data have changed, all are checked. If the data are not
    readable now, a finished cell stays finished.
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
    """A text that is equal for jobs to train together; None if training together is not faster or not wanted.

    On an accelerator, the training itself measures what is faster, so lanes do no harm.
    """
    from bnn_runner.runtime.devices import pick_device

    settings = experiment.settings
    if settings.stack == "never" or settings.prepare or settings.compile:
        return None
    try:
        on_cpu = pick_device(settings.device).type == "cpu"
        if on_cpu and settings.stack == "auto" and not _stacks(experiment):
            return None
    except Exception:  # a device or network that is not available: the job itself reports it
        return None
    return digest({k: v for k, v in flatten(experiment.config).items() if k not in LANE_KEYS})


def _stacks(experiment: Experiment) -> bool:
    """Whether the layers of the network accept stacked weights (see `training.lanes`)."""
    import torch

    from bnn_runner.rng import global_stream

    with global_stream(0, "skeleton"), torch.device("meta"):
        network: Any = experiment.model.build(experiment.noise.network_spec(experiment.data.spec()))
    return bool(getattr(network, "stacks_lanes", False))


def _groups(jobs: Sequence[Job], max_lanes: int) -> tuple[tuple[Job, ...], ...]:
    """Groups jobs with the same `lanes`, at most `max_lanes` together, in the order of their first jobs."""
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
