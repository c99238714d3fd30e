"""TensorBoard: scalars by epoch, scores, figures and the configuration, as event files, one folder per cell."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from bnn_runner.loggers.base import LoggedCell, missing_package


@dataclass(frozen=True)
class TensorBoard:
    """View with `tensorboard --logdir FOLDER`. A cell that is logged again replaces its folder."""

    folder: str | None

    def problems(self) -> list[str]:
        return missing_package("tensorboard", "tensorboard", "tensorboard")

    def log(self, cell: LoggedCell) -> None:
        import shutil

        from torch.utils.tensorboard import SummaryWriter

        root = cell.output_dir / "tensorboard" if self.folder is None else Path(self.folder)
        place = root / cell.name
        shutil.rmtree(place, ignore_errors=True)
        writer = SummaryWriter(str(place))
        try:
            for name, points in cell.series().items():
                for epoch, value in points:
                    writer.add_scalar(name, value, epoch)
            for name, value in cell.scores.items():
                writer.add_scalar(f"score/{name}", value, 0)
            rows = "\n".join(f"| {key} | {value} |" for key, value in cell.config.items())
            writer.add_text("config", f"| key | value |\n|---|---|\n{rows}", 0)
            for figure in cell.figures:
                writer.add_image(f"figure/{figure.stem}", _pixels(figure), 0, dataformats="HWC")
        finally:
            writer.close()


def _pixels(figure: Path) -> object:
    from matplotlib.image import imread

    return (imread(figure)[..., :3] * 255).round().astype("uint8")
