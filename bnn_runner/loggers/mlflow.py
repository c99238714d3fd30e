"""MLflow: one run per cell, in a local store or on a tracking server."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass

from bnn_runner.loggers.base import LoggedCell, missing_package

_LONGEST = 500  # characters of a parameter's value that every store accepts


@dataclass(frozen=True)
class MLflow:
    """Parameters are the configuration, metrics the history and the scores, artifacts the figures.

    The run has the cell's name, also as the tag `cell`: a cell that is logged again replaces its own run.
    """

    uri: str | None
    experiment: str

    def problems(self) -> list[str]:
        return missing_package("mlflow", "mlflow", "mlflow")

    def log(self, cell: LoggedCell) -> None:
        from mlflow.entities import Metric, Param, RunTag
        from mlflow.tracking import MlflowClient

        uri = self.uri or os.environ.get("MLFLOW_TRACKING_URI") or f"sqlite:///{cell.output_dir / 'mlflow.db'}"
        client = MlflowClient(tracking_uri=uri)
        found = client.get_experiment_by_name(self.experiment)
        if found is None:
            store = (cell.output_dir / "mlflow").as_uri() if uri.startswith("sqlite:") else None
            where = client.create_experiment(self.experiment, artifact_location=store)
        else:
            where = found.experiment_id
        for old in client.search_runs([where], filter_string=f"tags.cell = '{cell.name}'"):
            client.delete_run(old.info.run_id)
        run = client.create_run(where, run_name=cell.name, tags={"cell": cell.name}).info.run_id
        params = [Param(_name(key), str(value)[:_LONGEST]) for key, value in cell.config.items()]
        metrics = [Metric(_name(key), value, 0, 0) for key, value in cell.scores.items()]
        for name, points in cell.series().items():
            metrics += [Metric(_name(name), value, 0, epoch) for epoch, value in points]
        try:
            for first in range(0, len(params), 100):
                client.log_batch(run, params=params[first : first + 100])
            for first in range(0, len(metrics), 1000):
                client.log_batch(run, metrics=metrics[first : first + 1000])
            client.log_batch(run, tags=[RunTag("folder", str(cell.folder))])
            for figure in cell.figures:
                client.log_artifact(run, str(figure), "figures")
        except BaseException:
            client.set_terminated(run, "FAILED")
            raise
        client.set_terminated(run)


def _name(key: str) -> str:
    """Replace characters that MLflow does not support: `marginal_loglik@val` becomes `marginal_loglik/val`."""
    return re.sub(r"[^\w\-. :/]", "/", key, flags=re.ASCII)
