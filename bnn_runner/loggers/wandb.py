"""Weights & Biases: one run per cell, offline by default."""

from __future__ import annotations

import os
from dataclasses import dataclass

from bnn_runner.errors import UserError
from bnn_runner.loggers.base import LoggedCell, missing_package

MODES = ("online", "offline", "disabled")


@dataclass(frozen=True)
class WeightsAndBiases:
    """Offline runs are kept in <output_dir>/wandb; `wandb sync` uploads them."""

    project: str
    mode: str | None

    def __post_init__(self) -> None:
        if self.mode is not None and self.mode not in MODES:
            raise UserError(f"logger.mode must be one of {', '.join(MODES)}, or null; got {self.mode}.")

    def problems(self) -> list[str]:
        return missing_package("wandb", "wandb", "wandb")

    def log(self, cell: LoggedCell) -> None:
        import wandb

        run = wandb.init(
            project=self.project,
            name=cell.name,
            id=cell.name.replace("/", "-"),
            config=dict(cell.config),
            dir=str(cell.output_dir),
            mode=self.mode or os.environ.get("WANDB_MODE") or "offline",
            resume="allow",
            reinit="finish_previous",
            settings=wandb.Settings(silent=True, console="off"),
        )
        try:
            by_epoch: dict[int, dict[str, float]] = {}
            for name, points in cell.series().items():
                for epoch, value in points:
                    by_epoch.setdefault(epoch, {})[name] = value
            for epoch, values in sorted(by_epoch.items()):
                run.log(values, step=epoch)
            run.log({f"figure/{f.stem}": wandb.Image(str(f)) for f in cell.figures})
            run.summary.update({f"score/{name}": value for name, value in cell.scores.items()})
        finally:
            run.finish()
