"""Every data set with what it recommends, made small where it is large: one table, beside a trivial predictor.

    python scripts/data_presets.py                    all that are there, MAP and Laplace (an hour on 2 cores)
    python scripts/data_presets.py --only wine,co2    these alone; the other rows of the table stay
    python scripts/data_presets.py --skip mnist,svhn  all but these

Writes outputs/results/data_sets.csv and .md after each set. Finished runs are found again in --folder
(outputs/data_sets), so that a second call goes on where the first stopped. What a set is reduced to
stands in its YAML file, `recommended.small`. Trivial: a normal distribution with the training targets'
mean and standard deviation, or the training part's class frequencies (one point of each class added).
Exit code 1 where a run failed; sets whose files are absent are listed as not available.
"""

from __future__ import annotations

import argparse
import csv
import json
import math
import sys
from pathlib import Path
from typing import Any

import torch

import bnn_runner
from bnn_runner.config.groups import Catalogue
from bnn_runner.config.overrides import to_text
from bnn_runner.errors import RunFailed, UserError
from bnn_runner.experiment import load_experiment
from bnn_runner.tasks import Task

RESULTS = Path(__file__).resolve().parents[1] / "outputs" / "results"
METHODS = ("map", "laplace")
COLUMNS = (
    "data",
    "kind",
    "inputs",
    "train",
    "test",
    "model",
    "reduced to",
    "score",
    *(f"{name} {what}" for name in ("trivial", *METHODS) for what in ("score", "marginal")),
    *(f"{name} seconds" for name in METHODS),
    "status",
)
NOT_HERE = ("missing", "needs a file of yours", "needs a folder of yours")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", help="names of data sets, with commas")
    parser.add_argument("--skip", default="", help="likewise, those left out")
    parser.add_argument("--folder", default="outputs/data_sets", help="where the runs go")
    arguments = parser.parse_args()
    catalogue = Catalogue()
    names = arguments.only.split(",") if arguments.only else catalogue.choices("data")
    rows = read_rows()
    for name in names:
        if name in arguments.skip.split(","):
            continue
        print(f"{name} ...", file=sys.stderr, flush=True)
        rows[name] = row_of(name, catalogue, arguments.folder)
        print("  " + ", ".join(f"{k} {v}" for k, v in rows[name].items() if k != "data"), file=sys.stderr, flush=True)
        write_rows({name: rows[name] for name in catalogue.choices("data") if name in rows})
    return int(any(row["status"].startswith("failed") for row in rows.values()))


def row_of(name: str, catalogue: Catalogue, folder: str) -> dict[str, str]:
    """What the set is and how well both methods do on it, or why there is nothing to say."""
    small = (catalogue.load("data", name).get("recommended") or {}).get("small") or {}
    words = [f"data={name}", *(f"{key}={to_text(value)}" for key, value in small.items())]
    words += [f"output_dir={folder}", "figures=false", "metric=[marginal,rmse,accuracy]", "time_limit=null"]
    row = dict.fromkeys(COLUMNS, "") | {"data": name}
    row["reduced to"] = ", ".join(f"{k.partition('.')[2]} {to_text(v)}" for k, v in small.items())
    place = ""
    try:
        experiment = load_experiment([*words, "method=map"])
        place = str(experiment.settings.data_path)
        task = experiment.data.load(experiment.settings.data_path, experiment.settings.seed)
        row |= facts(task) | {"model": str(experiment.choices["model"])} | trivial(task)
        for method in METHODS:
            row |= scored(method, bnn_runner.run([*words, f"method={method}"], quiet=True))
        row["status"] = "ok"
    except (UserError, RunFailed) as error:
        reason = str(error).replace(place, "<data_dir>") if place else str(error)
        absent = isinstance(error, UserError) and any(word in reason for word in NOT_HERE)
        row["status"] = ("not available: " if absent else "failed: ") + " ".join(reason.split())[:150]
    return row


def facts(task: Task) -> dict[str, str]:
    spec = task.spec
    return {
        "kind": "regression" if spec.kind == "regression" else f"{spec.num_outputs} classes",
        "inputs": " × ".join(map(str, spec.input_shape)),
        "train": str(len(task.train)),
        "test": str(len(task.test)),
        "score": "RMSE" if spec.kind == "regression" else "accuracy",
    }


def trivial(task: Task) -> dict[str, str]:
    """Scores of the training part's mean and standard deviation, or class frequencies, on the test part."""
    train, test = task.train.targets, task.test.targets
    assert train is not None and test is not None
    if task.spec.kind == "regression":
        mean, sd, scale = train.double().mean(0), train.double().std(0, correction=0), task.target_scale.double()
        error = (test.double() - mean) * scale
        normal = torch.distributions.Normal(torch.zeros(()), sd * scale)
        score, marginal = error.square().mean().sqrt(), normal.log_prob(error).sum(-1).mean()
    else:
        counts = torch.bincount(train, minlength=task.spec.num_outputs).double()
        shares = (counts + 1) / (counts + 1).sum()
        score, marginal = (test == counts.argmax()).double().mean(), shares.log()[test].mean()
    return {"trivial score": number(float(score)), "trivial marginal": number(float(marginal))}


def scored(method: str, run: Any) -> dict[str, str]:
    """Test scores of a finished run, and the seconds that it took when it was run."""
    test = run.scores[run.scores["split"] == "test"].set_index("metric")["value"]
    name = "rmse" if "rmse" in test and not math.isnan(test["rmse"]) else "accuracy"
    provenance = json.loads((run.folder / "provenance.json").read_text(encoding="utf-8"))
    stages = provenance["seconds"]
    seconds = provenance["training_seconds_when_trained"] + stages["posterior"] + stages["evaluation"]
    return {
        f"{method} score": number(test[name]),
        f"{method} marginal": number(test["marginal_loglik"]),
        f"{method} seconds": f"{seconds:.0f}",
    }


def number(value: float) -> str:
    return f"{value:.4g}"


def read_rows() -> dict[str, dict[str, str]]:
    """The rows there are, of sets that this call does not touch."""
    path = RESULTS / "data_sets.csv"
    if not path.is_file():
        return {}
    with path.open(encoding="utf-8", newline="") as file:
        return {row["data"]: row for row in csv.DictReader(file)}


def write_rows(rows: dict[str, dict[str, str]]) -> None:
    RESULTS.mkdir(parents=True, exist_ok=True)
    with (RESULTS / "data_sets.csv").open("w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, COLUMNS, lineterminator="\n", extrasaction="ignore")
        writer.writeheader()
        writer.writerows(rows.values())
    lines = ["| " + " | ".join(COLUMNS) + " |", "|" + "---|" * len(COLUMNS)]
    lines += ["| " + " | ".join(row.get(c, "") for c in COLUMNS) + " |" for row in rows.values()]
    (RESULTS / "data_sets.md").write_text("\n".join(lines) + "\n", encoding="utf-8")


if __name__ == "__main__":
    sys.exit(main())
