"""Downloads the missing files of a data set; with `prepare=true` also those of its out-of-distribution sets."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from bnn_runner.data.downloads import ensure
from bnn_runner.data.sources import Published, Source, look
from bnn_runner.errors import UserError
from bnn_runner.experiment import Experiment
from bnn_runner.tasks import DataSet

Say = Callable[[str], None]


def download_missing(data: DataSet, data_dir: Path, say: Say, stop: Callable[[], bool]) -> None:
    """Downloads the files of a data set that are missing.

    Args:
        data: The data set.
        data_dir: The folder of all data sets.
        say: Prints one line for the user.
        stop: Returns true once a stop is requested.

    Raises:
        UserError: If a file is not available.
        Interrupted: If a stop is requested.
    """
    if isinstance(data, Published):
        for source in data.sources():
            ensure(source, data_dir, say, stop)


def prepare_data(experiment: Experiment, say: Say, stop: Callable[[], bool]) -> None:
    """Downloads a data set and its out-of-distribution sets, reads them, and lists what is ready and what is missing.

    Raises:
        UserError: If the data set itself is not available; a missing out-of-distribution set is only reported.
        Interrupted: If a stop is requested.
    """
    data, data_dir, seed = experiment.data, experiment.settings.data_path, experiment.settings.seed
    choice = str(experiment.choices["data"])
    download_missing(data, data_dir, say, stop)
    failures: dict[str, str] = {}
    partners = data.partner_sources() if isinstance(data, Published) else {}
    for name, source in partners.items():
        try:
            ensure(source, data_dir, say, stop)
        except UserError as error:
            failures[name] = str(error)
    task = data.load(data_dir, seed)
    sizes = f"{len(task.train):,} train, {len(task.val):,} validation, {len(task.test):,} test"
    say(f"data={choice}: ready ({sizes})")
    for source in data.sources() if isinstance(data, Published) else ():
        _list_files(source, data_dir, say)
    for note in task.notes:
        say(f"note: {note}")
    for name, split in task.ood.items():
        say(f"out-of-distribution set {name}: ready ({len(split):,} points)")
        if name in partners and name not in failures:
            _list_files(partners[name], data_dir, say)
    for name, reason in task.unavailable.items():
        say(f"out-of-distribution set {name}: not available ({failures.get(name, reason)})")


def _list_files(source: Source, data_dir: Path, say: Say) -> None:
    """Prints path and size of the files of a source."""
    folder = look(source, data_dir).place
    for file in source.files:
        path = folder / file.name
        path = path if path.is_file() else path.with_name(f"{file.name}.gz")
        say(f"  {path}  {path.stat().st_size:,} bytes")
