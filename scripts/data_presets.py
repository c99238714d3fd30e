"""MAP and Laplace on every data set with its recommended settings, compared with a trivial predictor, in one table.

    python scripts/data_presets.py                    all available data sets (an hour on 2 cores)
    python scripts/data_presets.py --only wine,co2    these data sets; the other rows of the table are kept
    python scripts/data_presets.py --skip mnist,svhn  all except these

Writes outputs/results/data_sets.csv and .md after each data set. Finished runs are kept in --folder
(outputs/data_sets), so the same command resumes after an interruption. Large data sets are reduced as their YAML file
says (`recommended.small`). On classes the table also compares the posterior with its own network (the centre) at the
same test points, by the marginal and the dyadic log-likelihood (kappa = 2). The trivial predictor is a normal
distribution with the training targets' mean and standard deviation, or the class frequencies of the training part (plus
one point per class). Exit code 1 if a run failed; data sets with missing files are listed as not available.
"""

from __future__ import annotations

import argparse
import csv
import json
import math
import sys
from collections.abc import Mapping
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
    "precision",
    "validation: marginal - network",
    "marginal - network",
    "network dyadic",
    "dyadic - network",
    *(f"{name} seconds" for name in METHODS),
    "status",
)
SMALL_NATS = 1e-3
"""Differences of a marginal below this are those of a posterior that is almost the network itself."""
NEARLY_THE_NETWORK = 1e5
"""A precision from which on the posterior is almost the network itself."""
NOT_HERE = ("missing", "needs a file of yours", "needs a folder of yours")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", help="names of data sets, separated by commas")
    parser.add_argument("--skip", default="", help="names of data sets to leave out")
    parser.add_argument("--folder", default="outputs/data_sets", help="folder of the runs")
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
    """One row: the data set and the scores of both methods, or the reason why there are none."""
    small = (catalogue.load("data", name).get("recommended") or {}).get("small") or {}
    words = [f"data={name}", *(f"{key}={to_text(value)}" for key, value in small.items())]
    words += [f"output_dir={folder}", "figures=false", "time_limit=null"]
    words += ["metric=[marginal,rmse,accuracy,dyadic]", "metric.dyadic.kappas=[2]"]
    row = dict.fromkeys(COLUMNS, "") | {"data": name}
    row["reduced to"] = ", ".join(f"{k.partition('.')[2]} {to_text(v)}" for k, v in small.items())
    place = ""
    try:
        experiment = load_experiment([*words, "method=map"])
        place = str(experiment.settings.data_path)
        task = experiment.data.load(experiment.settings.data_path, experiment.settings.seed)
        row |= facts(task) | {"model": str(experiment.choices["model"])} | trivial(task)
        for method in METHODS:
            run = bnn_runner.run([*words, f"method={method}"], quiet=True)
            row |= scored(method, run)
        row |= compared(run) if task.spec.kind == "classification" else {}
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
    """Test scores and seconds of a finished run."""
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


def compared(run: Any) -> dict[str, str]:
    """The posterior and its own network at the same test points, with paired standard errors."""
    test, val = (run.scores[run.scores["split"] == split].set_index("metric") for split in ("test", "val"))

    def shown(table: Any, name: str) -> str:
        return f"{table['value'][name]:+.3g} ± {table['standard_error'][name]:.2g}"

    precision = run.facts["report"].get("prior_precision")
    return {
        "precision": "several" if precision is None else number(precision),
        "validation: marginal - network": shown(val, "marginal_loglik_minus_centre"),
        "marginal - network": shown(test, "marginal_loglik_minus_centre"),
        "network dyadic": number(test["value"]["centre_dyadic_loglik"]),
        "dyadic - network": shown(test, "dyadic_loglik_minus_centre"),
    }


def summary(rows: Mapping[str, Mapping[str, str]]) -> list[str]:
    """Lines about the rows of classes: on how many Laplace keeps the marginal, and on how many it gains jointly."""
    found = {n: r for n, r in rows.items() if r.get("marginal - network")}
    kept, above, misses = 0, 0, []
    for name, row in found.items():
        marginal, error = map(float, row["marginal - network"].split(" ± "))
        dyadic = float(row["dyadic - network"].split(" ± ")[0])
        keeps, gains = marginal >= min(-2 * error, -SMALL_NATS), dyadic > 0
        kept, above = kept + keeps, above + gains
        if not (keeps and gains):
            misses.append(
                f"- {name}: marginal {row['marginal - network']}, dyadic {row['dyadic - network']}; {why(row)}"
            )
    if not found:
        return []
    return [
        "",
        f"Laplace and its own network on {len(found)} classification rows, at the same test points: the marginal is "
        f"not below the network's by more than two standard errors and {SMALL_NATS:g} nats on {kept}; the dyadic score "
        f"is above the network's on {above}." + (" The others:" if misses else ""),
        *([""] if misses else []),
        *misses,
    ]


def why(row: Mapping[str, str]) -> str:
    """What was measured about a row on which Laplace is worse than its network."""
    precision = row["precision"]
    words = [
        f"the validation part selected the precision {precision}, where its marginal differs from the network's by "
        f"{row['validation: marginal - network']}"
    ]
    if precision != "several" and float(precision) >= NEARLY_THE_NETWORK:
        words.append("the posterior is almost the network there")
    if float(row["map score"]) == 1.0:
        words.append("every test point is classified correctly, so that no point can gain by uncertainty")
    return "; ".join(words)


def number(value: float) -> str:
    return f"{value:.4g}"


def read_rows() -> dict[str, dict[str, str]]:
    """The rows of the kept table, by data set."""
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
    (RESULTS / "data_sets.md").write_text("\n".join([*lines, *summary(rows)]) + "\n", encoding="utf-8")


if __name__ == "__main__":
    sys.exit(main())
