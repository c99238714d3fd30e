"""A writer of synthetic cells: a folder as a finished, failed or half-done run leaves it."""

import csv
import json
from pathlib import Path

import pytest

FIELDS = ["metric", "value", "standard_error", "n", "split", "tau", "kappa", "draws"]
FIELDS += ["better", "unit", "status", "note"]


@pytest.fixture
def write_cell(tmp_path):
    """write_cell(method, seed, scores, ...) -> folder under tmp_path/outputs/runs."""

    def write(
        method="map",
        seed=0,
        scores=(("rmse", 1.0),),
        *,
        data="yacht",
        model="mlp",
        status="DONE",
        reason="",
        config=None,
        choices=None,
        results_version=1,
        kind="regression",
        hash8="0000abcd",
        shortened=None,
        root=None,
        content="",
    ):
        folder = (root or tmp_path / "outputs") / "runs" / data / model / method / f"{seed}-{hash8}"
        folder.mkdir(parents=True)
        settings = {
            "seed": seed,
            "data.name": data,
            "model.hidden": [50],
            "method._target_": method,
            "schedule.epochs": 100,
            "eval.num_draws": 100,
            "device": "auto",
            "output_dir": "outputs",
            "metric.rmse.name": "rmse",
        }
        facts = {
            "data": data,
            "model": model,
            "method": method,
            "seed": seed,
            "hash": hash8,
            "choices": {"schedule": "adam"} | (choices or {}),
            "results_version": results_version,
            "version": "0.1.0",
            "kind": kind,
            "shortened": shortened,
            "config": settings | (config or {}),
            "content": content,
        }
        (folder / "cell.json").write_text(json.dumps(facts))
        if scores is not None:
            with (folder / "metrics.csv").open("w", newline="") as file:
                writer = csv.DictWriter(file, FIELDS, restval="")
                writer.writeheader()
                for score in scores:
                    row = {"metric": score[0], "value": score[1]} if isinstance(score, tuple) else score
                    writer.writerow({"better": "lower", "split": "test", "status": "ok", "n": 10} | row)
        if status is not None:
            (folder / status).write_text(reason or json.dumps({"finished": "2026-01-01T00:00:00"}))
        return folder

    write.outputs = tmp_path / "outputs"
    return write


@pytest.fixture
def nine_cells(write_cell):
    """Three methods, three seeds each, with rmse 1.0, 0.8, 0.5 and a seed spread of 0.01."""
    for place, method in enumerate(("map", "ensemble", "laplace")):
        for seed in range(3):
            rmse = (1.0, 0.8, 0.5)[place] + 0.01 * (seed - 1)
            joint = [
                {
                    "metric": "joint_loglik",
                    "tau": tau,
                    "value": -rmse * tau,
                    "standard_error": 0.001 * tau,
                    "better": "higher",
                    "unit": "nats per block",
                }
                for tau in (1, 5, 10)
            ]
            scores = [{"metric": "rmse", "value": rmse, "standard_error": 0.001}, *joint]
            write_cell(method, seed, scores, hash8=f"{place}000abcd")
    return write_cell


@pytest.fixture
def is_picture():
    """Whether a file is a PNG with something drawn on it."""

    def check(path: Path) -> bool:
        from matplotlib.image import imread

        pixels = imread(path)
        return path.stat().st_size > 5000 and pixels.shape[0] > 200 and float(pixels[..., :3].std()) > 0.02

    return check


@pytest.fixture(autouse=True)
def readable_figures(seen_figures):
    """No figure that a test of this folder draws has text that overlaps, is cut off or is too small."""
    return seen_figures
