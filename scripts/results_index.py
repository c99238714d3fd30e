"""Writes outputs/results/README.md: an index of every kept table and figure, grouped by the command that makes it.

    python scripts/results_index.py            write the index (a second)
    python scripts/results_index.py --check    change nothing; exit code 1 if the index is out of date

Presets and their titles are those of presets.yaml; COSTS and OTHERS list the other commands. A file belongs to the
group with the longest name at the start of the file's name, or to the group whose pattern it matches.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import yaml

from bnn_runner.config.where_rules import SMALL
from bnn_runner.runtime.files import write_text

HERE = Path(__file__).resolve().parent
RESULTS = HERE.parent / "outputs" / "results"
INDEX = "README.md"
WIDTH = 240
"""Of a thumbnail, in pixels."""


@dataclass(frozen=True)
class Group:
    """Files of one command: those whose names start with `name`, or match the glob pattern `files`."""

    name: str
    title: str
    command: str
    files: str = ""


COSTS = (
    Group("laplace_speed", "Laplace here and in laplace-torch: seconds and memory", "scripts/benchmark_laplace.py"),
    Group("laplace_scale", "Laplace on ResNet-18: seconds and memory of each structure", "scripts/laplace_scale.py"),
    Group("method_costs", "Steps of other methods, compared with MAP", "scripts/benchmark_methods.py"),
    Group("online_evidence", "Evidence during training: cost and gain", "scripts/benchmark_online.py"),
    Group("training_overhead", "The runner's training, compared with a bare loop", "scripts/benchmark_training.py"),
    Group("sweep_costs", "Overhead of sweeps", "scripts/benchmark_sweeps.py"),
    Group(
        "joint_convergence",
        "Joint scores from draws: how often they are called converged although biased",
        "scripts/joint_convergence.py",
    ),
    Group(
        "tangent_speed",
        "The tangent model's optimum, compared with training the network",
        "scripts/benchmark_tangent.py",
    ),
    Group("report_costs", "Cost of bnn-report on 2,000 cells", "scripts/benchmark_report.py"),
)
OTHERS = (
    Group(
        "evidence_at_optimum",
        "Whether precisions selected at v* predict better than those selected at w*: ten networks, two data sets",
        "scripts/evidence_at_optimum.py",
    ),
    Group(
        "laplace_defaults",
        "Rules for Laplace's prior precision on classes, and the choice of the default",
        "scripts/laplace_defaults.py",
    ),
    Group("data_sets", "Every data set with its recommended settings: MAP and Laplace", "scripts/data_presets.py"),
    Group("bands", "The default run, `bnn-run`", "scripts/readme_outputs.py --run"),
    Group("yacht", "UCI yacht: three methods, three seeds (the README's example)", "scripts/readme_outputs.py --run"),
)

ENDINGS = {
    "_tables.csv": "every table of the report, one line per number, with standard error, median and quartiles",
    "_pruning.csv": "numbers of the pruning table",
    "_pruning.md": "what removing weights costs, by share of removed weights",
    "_pruning.png": "signal-to-noise ratios of the weights, and the error by share of removed weights",
    "_choices.csv": "numbers of the second table: the largest evidence of each family of precisions",
    "_curves.png": "curves: joint scores by block size, scores under shift, training by epoch",
    "_baseline.png": "differences from the baseline on every data set",
    "_marginal_dyadic.png": "marginal against dyadic score, one point per method",
    "_structures.png": "evidence of one network by structure of the curvature",
    "_cost.png": "scores against seconds",
    "_evidence.png": "log evidence against the test score",
    "_pictures.png": "predictions of each method, first seed",
    "_25_gaussians.png": "SGLD and cyclical SGLD on 25 Gaussians",
    "_double_well.png": "SGHMC in a double well, with and without friction",
    "_mixture.png": "SGLD and the exact posterior of a two-component mixture",
    "_matern_1d.png": "predictions at seven precisions, and both evidences and scores by precision, on matern_1d",
    "_my_1d.png": "predictions at seven precisions, and both evidences and scores by precision, on my_1d",
    "_distances.png": "distance of each method to HMC in the gap, with HMC's own error",
    "gap_methods.png": "predictive distribution of each method, compared with HMC's",
    "evidence_curves.png": "log-likelihoods, test error and log evidence by epoch",
    "bands.png": "data with a gap, mean, draws, and bands of two standard deviations",
    ".md": "table",
    ".csv": "all numbers of the table, unrounded",
    ".tex": "table for LaTeX",
    ".png": "comparison of the methods, one panel per score and data set",
}
"""What a file contains, by the end of its name; the first that fits."""


def presets() -> list[Group]:
    """The groups of presets.yaml, in its order; a preset's other sizes are groups of their own."""
    groups = []
    for entry in yaml.safe_load((HERE / "presets.yaml").read_text(encoding="utf-8")):
        name, command = entry["name"], f"scripts/reproduce.py {entry['name']}"
        groups.append(Group(name, entry["what"], command, entry.get("files", "")))
        others = [size for size in entry["minutes"] if size != SMALL]
        groups += [
            Group(f"{name}_{size}", f"{entry['what']}; size={size}", f"{command} --size {size}") for size in others
        ]
    return groups


def owner(path: Path, groups: Sequence[Group]) -> Group:
    """The group that a file belongs to. Raises ValueError if there is none."""
    fitting = [g for g in groups if path.stem == g.name or path.name.startswith(f"{g.name}_")]
    fitting = fitting or [g for g in groups if g.files and path.match(g.files)]
    if not fitting:
        raise ValueError(
            f"{path.name} belongs to no command. Add its command to COSTS or OTHERS in scripts/results_index.py, or "
            "its preset to scripts/presets.yaml."
        )
    return max(fitting, key=lambda g: len(g.name))


def describe(path: Path) -> str:
    """One line about a file."""
    return next(text for ending, text in ENDINGS.items() if path.name.endswith(ending))


def entries(group: Group, files: Iterable[Path]) -> list[str]:
    """Markdown of one group: tables first, then figures with a thumbnail."""
    lines = [f"### {group.name}", "", f"{group.title}.", "", f"`python {group.command}`", ""]
    figures = []
    for path in sorted(files, key=lambda p: (p.stem, p.suffix != ".md", p.suffix)):
        entry = f"[{path.name}]({path.name}): {describe(path)}"
        if path.suffix == ".png":
            figures.append(f'| <img src="{path.name}" width="{WIDTH}"> | {entry} |')
        else:
            lines.append(f"- {entry}")
    if figures:
        lines += ["", "| | |", "|---|---|", *figures]
    return [*lines, ""]


def index(results: Path) -> str:
    """The text of the index of a folder of results."""
    sections = {"Tables and figures of the talks": presets(), "Costs": COSTS, "Other tables and figures": OTHERS}
    groups = [group for listed in sections.values() for group in listed]
    files: dict[str, list[Path]] = {}
    for path in sorted(results.iterdir()):
        if path.is_file() and path.name != INDEX and not path.name.startswith("."):
            files.setdefault(owner(path, groups).name, []).append(path)
    lines = [
        "# Kept tables and figures",
        "",
        "Written by `python scripts/results_index.py`. Tables of presets end with their command, the machine, the "
        "versions and the day. `python scripts/reproduce.py` lists what each preset costs.",
        "",
    ]
    for title, listed in sections.items():
        lines += [f"## {title}", ""]
        for group in listed:
            if group.name in files:
                lines += entries(group, files[group.name])
    return "\n".join(lines).rstrip() + "\n"


def update(results: Path) -> None:
    """Write the index of a folder of results."""
    write_text(results / INDEX, index(results))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="change nothing; exit code 1 if the index is out of date")
    arguments = parser.parse_args()
    path, text = RESULTS / INDEX, index(RESULTS)
    if not arguments.check:
        update(RESULTS)
    elif not path.exists() or path.read_text(encoding="utf-8") != text:
        print(f"outputs/results/{INDEX} is out of date. Run: python scripts/results_index.py", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
