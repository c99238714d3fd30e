"""Cost of the runner's training relative to a bare loop over the same network.

Writes outputs/results/training_overhead.{csv,md}.

    python scripts/benchmark_training.py              all rows, some minutes on 2 cores
    python scripts/benchmark_training.py --quick      fewer repeats, nothing is written

The runner's side is `LaneTrainer.train` as the runner calls it, with progress, stop requests, a checkpoint file, a
check for non-finite losses, and the history. The bare side is a plain loop: the same network called as a module,
tensors in memory, a gather in shuffled order, `loss.backward()`, a fused torch.optim optimiser with the same weight
decay, and a cosine learning rate. It uses the faster of the two memory layouts of images. Both sides take turns in one
process, with the same number of steps and equal batches; the ratio is the median over pairs. Rows with one thread are
measured in CPU time, which other programs disturb least; the others in wall time. Exit code 3 if a ratio exceeds the
limit.
"""

from __future__ import annotations

import argparse
import csv
import io
import math
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor, nn

from bnn_runner.base import Model
from bnn_runner.data.images import PixelScaling
from bnn_runner.models.lenet import LeNet
from bnn_runner.models.likelihoods import NoiseRule
from bnn_runner.models.mlp import MLP
from bnn_runner.models.priors import Isotropic
from bnn_runner.models.resnet18 import ResNet18
from bnn_runner.models.resnet20 import ResNet20
from bnn_runner.runs.provenance import device_name
from bnn_runner.runtime.console import Console
from bnn_runner.runtime.devices import pick_device, thread_count
from bnn_runner.runtime.signals import stop_on_signals
from bnn_runner.tasks import Split, Task, TaskSpec
from bnn_runner.training.engine import LaneTrainer
from bnn_runner.training.schedules import Schedule
from bnn_runner.training.state import Lane, TrainingConfig

RESULTS = Path(__file__).resolve().parents[1] / "outputs" / "results"
LIMIT = 1.05


@dataclass(frozen=True)
class Row:
    """One network with the size of its data; a repeat is `epochs` epochs over `points` points."""

    name: str
    model: Model
    shape: tuple[int, ...]
    kind: str
    points: int
    batch_size: int
    optimizer: str
    epochs: int


ROWS = (
    Row("MLP 13-50-1, regression", MLP((50,), "tanh"), (13,), "regression", 448, 32, "adam", 20),
    Row("MLP 784-200-200-10", MLP((200, 200), "relu"), (1, 28, 28), "classification", 1280, 128, "adam", 6),
    Row("LeNet-5", LeNet(), (1, 28, 28), "classification", 1280, 128, "adam", 1),
    Row("ResNet-20", ResNet20(), (3, 32, 32), "classification", 256, 128, "sgd", 1),
)
GPU_ROWS = (Row("ResNet-18", ResNet18(), (3, 32, 32), "classification", 12800, 128, "sgd", 1),)


def make_task(row: Row, device: torch.device) -> Task:
    """Random data; their content does not affect the time."""
    g = torch.Generator().manual_seed(0)
    n, outputs = row.points, 1 if row.kind == "regression" else 10
    if row.kind == "regression":
        split = Split(torch.randn(n, *row.shape, generator=g), torch.randn(n, 1, generator=g), torch.arange(n))
    else:
        pixels = torch.randint(0, 256, (n, *row.shape), generator=g, dtype=torch.uint8)
        scaling = PixelScaling((0.5,) * row.shape[0], (0.25,) * row.shape[0])
        split = Split(pixels, torch.randint(0, 10, (n,), generator=g), torch.arange(n), scaling)
    spec = TaskSpec("random", row.kind, row.shape, outputs, 0.0)  # type: ignore[arg-type]
    none = split.subset(torch.arange(0))
    task = Task(spec, split, none, none, {}, "", torch.zeros(outputs), torch.ones(outputs))
    return task.to(device, torch.float32)


def runner(row: Row, task: Task, schedule: Schedule, precision: str, folder: Path) -> Callable[[], None]:
    """The runner's training as `bnn-run` calls it, with a new trainer."""
    device = task.train.inputs.device
    config = TrainingConfig(row.model, schedule, Isotropic(1.0), NoiseRule(), precision)
    group = LaneTrainer(config, [Lane(task, 1)], device)
    progress = Console(io.StringIO()).progress()

    def work() -> None:
        (folder / "checkpoint").unlink(missing_ok=True)  # a slow run leaves one, which must not be resumed
        with stop_on_signals() as stop:
            group.train(folder / "checkpoint", progress, stop)

    return work


def bare(row: Row, task: Task, schedule: Schedule, precision: str, layout: torch.memory_format) -> Callable[[], None]:
    """The bare loop."""
    device, n = task.train.inputs.device, row.points
    torch.manual_seed(1)
    network = row.model.build(task.spec).to(device)
    if len(row.shape) == 3:
        network = network.to(memory_format=layout)
    inputs, targets = task.train.inputs, task.train.targets
    assert targets is not None
    parameters: list[nn.Parameter] = list(network.parameters())
    log_noise = nn.Parameter(torch.zeros(1, device=device))
    if row.kind == "regression":
        groups = [{"params": parameters, "weight_decay": 1.0 / n}, {"params": [log_noise], "weight_decay": 0.0}]
    else:
        groups = [{"params": parameters, "weight_decay": 1.0 / n}]
    if row.optimizer == "adam":
        optimizer: torch.optim.Optimizer = torch.optim.Adam(groups, lr=schedule.lr, fused=True)
    else:
        optimizer = torch.optim.SGD(groups, lr=schedule.lr, momentum=0.9, nesterov=True, fused=True)
    mean = torch.full((row.shape[0], 1, 1), 0.5, device=device)
    std = torch.full((row.shape[0], 1, 1), 0.25, device=device)
    total = schedule.epochs * n // row.batch_size

    def loss_of(indices: Tensor) -> Tensor:
        x, y = inputs.index_select(0, indices), targets[indices]
        if row.kind == "regression":
            z = (y - network(x)) * torch.exp(-log_noise)
            return (0.5 * z.square() + log_noise).sum(-1).mean()
        x = x.float().div_(255).sub_(mean).div_(std).contiguous(memory_format=layout)
        with torch.autocast(device.type, torch.bfloat16, enabled=precision == "bf16"):
            outputs = network(x)
        return nn.functional.cross_entropy(outputs.float(), y)

    def work() -> None:
        step = 0
        for _ in range(schedule.epochs):
            for indices in torch.randperm(n).to(device).split(row.batch_size):
                for group in optimizer.param_groups:
                    group["lr"] = schedule.lr * 0.5 * (1 + math.cos(math.pi * step / total))
                loss = loss_of(indices)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                step += 1

    return work


def seconds(work: Callable[[], None], device: torch.device) -> float:
    """Seconds of one call, with the device synchronised; CPU time on a single thread, else wall time."""
    clock = time.process_time if _on_one_thread(device) else time.perf_counter
    start = clock()
    work()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return clock() - start


def _on_one_thread(device: torch.device) -> bool:
    return device.type == "cpu" and torch.get_num_threads() == 1


def measure(row: Row, device: torch.device, precision: str, repeats: int) -> dict[str, object]:
    """One row of the table; the first pair is a warm-up."""
    task = make_task(row, device)
    schedule = Schedule(row.optimizer, row.epochs, row.batch_size, lr=1e-3, nesterov=True)  # type: ignore[arg-type]
    layouts = [torch.contiguous_format, torch.channels_last] if len(row.shape) == 3 else [torch.contiguous_format]
    runs: dict[object, list[float]] = {side: [] for side in ("runner", *layouts)}
    with tempfile.TemporaryDirectory() as folder:
        for _ in range(repeats + 1):
            for side, took in runs.items():
                if side == "runner":
                    took.append(seconds(runner(row, task, schedule, precision, Path(folder)), device))
                else:
                    took.append(seconds(bare(row, task, schedule, precision, side), device))
    best = min(layouts, key=lambda layout: statistics.median(runs[layout][1:]))
    ours, theirs = runs["runner"][1:], runs[best][1:]
    steps = row.epochs * row.points // row.batch_size
    return {
        "network": row.name,
        "batch": row.batch_size,
        "threads": torch.get_num_threads(),
        "precision": precision,
        "clock": "cpu" if _on_one_thread(device) else "wall",
        "runner_ms": round(1000 * statistics.median(ours) / steps, 4),
        "bare_ms": round(1000 * statistics.median(theirs) / steps, 4),
        "ratio": round(statistics.median(a / b for a, b in zip(ours, theirs, strict=True)), 3),
        "ratio_of_fastest": round(min(ours) / min(theirs), 3),
        "points_per_second": round(row.batch_size * steps / statistics.median(ours)),
        "bare_points_per_second": round(row.batch_size * steps / statistics.median(theirs)),
        "repeats": repeats,
        "steps": steps,
        "optimizer": row.optimizer,
        "layout": "channels_last" if best is torch.channels_last else "contiguous",
    }


def main() -> int:
    """Measure, print, write; exit code 3 if a ratio exceeds the limit."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--precision", default="float32", choices=("float32", "bf16"))
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--only", default="", help="rows with this text in their name")
    parser.add_argument("--rows", default="cpu", choices=("cpu", "gpu"), help="gpu: ResNet-18, sized for a GPU")
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder of the table")
    parser.add_argument("--name", default="training_overhead", help="name of the table's files")
    parser.add_argument("--quick", action="store_true", help="three repeats, write nothing")
    parser.add_argument("--small", action="store_true", help="one repeat of two batches, as a smoke test")
    words = parser.parse_args()
    device = pick_device(words.device)
    repeats = 1 if words.small else 3 if words.quick else words.repeats
    counts = sorted({1, torch.get_num_threads()}, reverse=True) if device.type == "cpu" else [torch.get_num_threads()]
    rows = []
    for row in ROWS if words.rows == "cpu" else GPU_ROWS:
        if words.small:
            row = replace(row, points=16, batch_size=8, epochs=1)
        for threads in counts if words.only.lower() in row.name.lower() else []:
            with thread_count(threads):
                rows.append(measure(row, device, words.precision, repeats))
            print("  ".join(f"{key} {value}" for key, value in rows[-1].items()), flush=True)
    if not words.quick:
        write(rows, device, words.results, words.name)
    return 3 if any(float(str(row["ratio"])) > LIMIT for row in rows) else 0


def write(rows: list[dict[str, object]], device: torch.device, results: Path, name: str) -> None:
    """The table as CSV and Markdown."""
    results.mkdir(parents=True, exist_ok=True)
    where = f"{device_name(device)}, torch {torch.__version__}"
    with (results / f"{name}.csv").open("w", newline="", encoding="utf-8") as file:
        table = csv.DictWriter(file, [*rows[0], "machine"])
        table.writeheader()
        table.writerows(row | {"machine": where} for row in rows)
    header = "| network | batch | threads | clock | runner, ms per step | bare loop, ms per step | ratio |"
    lines = [header, "| --- | --: | --: | --- | --: | --: | --: |"]
    for r in rows:
        numbers = f"{r['runner_ms']:.3f} | {r['bare_ms']:.3f} | {r['ratio']:.3f}"
        lines.append(f"| {r['network']} | {r['batch']} | {r['threads']} | {r['clock']} | {numbers} |")
    lines += ["", f"{where}; {rows[0]['precision']}; ratio: median of {rows[0]['repeats']} interleaved pairs."]
    (results / f"{name}.md").write_text("\n".join(lines) + "\n", encoding="utf-8")


if __name__ == "__main__":
    sys.exit(main())
