"""Updates the generated parts of the README files: tables from the configuration, and the output of commands.

    python scripts/readme_outputs.py            the tables of choices and settings (a second)
    python scripts/readme_outputs.py --check    change nothing; exit code 1 if a table is out of date
    python scripts/readme_outputs.py --run      also the output of its commands, and its figures (a minute; the
                                                sweep on yacht needs BNN_DATA_DIR or the default data folder)
    python scripts/readme_outputs.py --tests    also the last line of pytest (five minutes)

Each generated part is between `<!-- begin NAME -->` and `<!-- end NAME -->`. Figures and tables go to outputs/results/.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from bnn_runner.cli.help import settings_lines
from bnn_runner.config.groups import BLOCKS, Catalogue
from bnn_runner.experiment import build

ROOT = Path(__file__).resolve().parents[1]
READMES = [ROOT / "README.md", ROOT / "conf" / "README.md"]
RESULTS = ROOT / "outputs" / "results"
BIN = Path(sys.executable).parent

UCI = ("UCI regression, ", "UCI classification, ")

# The README shows these lines of the default run's output, without the notes after the column n.
NOTE = re.compile(r"(?<=\d)  S/4 .*")
SHOWN = re.compile(
    r"^(data|model)=|^log evidence|^centre alone|^  metric|^(fit|joint|calibration|out of)|^cell |bands\.png"
    r"|^  (marginal_loglik ↑|rmse|joint_loglik tau=10|dyadic_loglik kappa=2 |coverage_90|ood_auroc \(ood/gap)"
)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="change nothing; exit code 1 if a table is out of date")
    parser.add_argument("--run", action="store_true", help="also the output of the commands, and the figures")
    parser.add_argument("--tests", action="store_true", help="also the last line of pytest")
    arguments = parser.parse_args()
    parts = tables()
    if arguments.run:
        parts |= outputs()
    if arguments.tests:
        parts["tests"] = closing_line()
    changed = []
    for path, after in put(parts).items():
        if after != path.read_text(encoding="utf-8"):
            changed.append(str(path.relative_to(ROOT)))
            if not arguments.check:
                path.write_text(after, encoding="utf-8")
    listed = ", ".join(changed)
    if arguments.check:
        if changed:
            print(f"Out of date: {listed}. Run: python scripts/readme_outputs.py", file=sys.stderr)
        return int(bool(changed))
    print(f"updated {listed or 'nothing'} ({', '.join(parts)})")
    return 0


def put(parts: dict[str, str]) -> dict[Path, str]:
    """Every README with the named parts between their markers. Raises SystemExit if a marker is missing or twice."""
    texts = {path: path.read_text(encoding="utf-8") for path in READMES}
    for name, content in parts.items():
        begin, end = f"<!-- begin {name} -->", f"<!-- end {name} -->"
        holders = [path for path, text in texts.items() if begin in text]
        if len(holders) != 1 or any(texts[holders[0]].count(mark) != 1 for mark in (begin, end)):
            raise SystemExit(f"One README must have {begin} and {end}, once each.")
        head, rest = texts[holders[0]].split(begin)
        texts[holders[0]] = f"{head}{begin}\n{content.strip()}\n{end}{rest.split(end)[1]}"
    return texts


# ------------------------------------------------------------------------------------- tables


def tables() -> dict[str, str]:
    """The parts that depend on the configuration alone."""
    catalogue = Catalogue()
    settings = [f"| `{key}` | `{value}` | {meaning} |" for key, value, meaning in settings_lines(catalogue)]
    return {
        "data": data_table(catalogue),
        "methods": method_table(catalogue),
        "others": other_choices(catalogue),
        "settings": "\n".join(["| key | default | meaning |", "|---|---|---|", *settings]),
        "ensembles": kept_table(
            "uci_ensemble", "marginal_loglik", "data", "quantity", "ours", "published", "n", "verdict", "source"
        ),
        "families": family_table(catalogue),
        "counts": counts(catalogue),
    }


FAMILIES = {
    "Point estimate, deep ensembles": ("map", "ensemble"),
    "Linearised Laplace, by curvature": ("laplace",),
    "Linearised Laplace, large networks": ("laplace_sampled", "laplace_functional", "laplace_subnetwork"),
    "Mixtures of Laplace": ("ensemble_laplace",),
    "Variational inference": ("bbb",),
    "Dropout": ("mc_dropout", "concrete_dropout"),
    "SWAG": ("swag",),
    "MCMC with mini-batches": ("sgmcmc",),
    "Hamiltonian Monte Carlo": ("hmc",),
}
"""Families of methods, by the modules of their classes."""


def family_table(catalogue: Catalogue) -> str:
    """The methods in one table, a family a row. Raises SystemExit for a method without a family."""
    modules = {c: catalogue.load("method", c)["_target_"].split(".")[-2] for c in catalogue.choices("method")}
    homeless = [choice for choice, module in modules.items() if not any(module in f for f in FAMILIES.values())]
    if homeless:
        raise SystemExit(f"FAMILIES must name the modules of {', '.join(homeless)}.")
    rows = ["| family | `method=` |", "|---|---|"]
    for family, members in FAMILIES.items():
        names = [f"`{choice}`" for module in members for choice in modules if modules[choice] == module]
        rows.append(f"| {family} | {', '.join(names)} |")
    return "\n".join(rows)


def counts(catalogue: Catalogue) -> str:
    """How many choices the larger groups have."""
    words = {"data": "data sets", "model": "architectures", "hyper": "hyperparameter rules", "metric": "metrics"}
    listed = [f"{len([c for c in catalogue.choices(g) if c != 'recommended'])} {word}" for g, word in words.items()]
    presets = len(catalogue.choices("experiment"))
    return f"There are {', '.join(listed)} and {presets} experiment presets."


def kept_table(name: str, quantity: str, *columns: str) -> str:
    """Some columns of the last table of outputs/results/<name>.md, the rows of one quantity."""
    text = (RESULTS / f"{name}.md").read_text(encoding="utf-8")
    lines = re.findall(r"(?:^\|.*\n)+", text, re.MULTILINE)[-1].splitlines()
    table = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    kept = [table[0].index(column) for column in columns]
    rows = [*table[:2], *(row for row in table[2:] if quantity in row)]
    return "\n".join(f"| {' | '.join(row[i] for i in kept)} |" for row in rows)


def data_table(catalogue: Catalogue) -> str:
    """One line per data set; the UCI sets of one kind share a line."""
    lines = {choice: catalogue.help_line("data", choice) for choice in catalogue.choices("data")}
    families = {prefix: {c: t for c, t in lines.items() if t.startswith(prefix)} for prefix in UCI}
    shared = {choice for family in families.values() for choice in family}
    rows = [f"| `{choice}` | {text} |" for choice, text in lines.items() if choice not in shared]
    for prefix, family in families.items():
        names, texts = ", ".join(f"`{c}`" for c in family), "; ".join(t.removeprefix(prefix) for t in family.values())
        rows.append(f"| {names} | {prefix}in this order: {texts} |")
    return "\n".join(["| `data=` | |", "|---|---|", *rows])


def other_choices(catalogue: Catalogue) -> str:
    lines = []
    for group in ("model", "prior", "hyper", "schedule", "augment", "metric", "logger"):
        named = [c for c in catalogue.choices(group) if c != "recommended"]
        choices = [f"`{c}`" if group == "metric" else f"`{c}` ({catalogue.help_line(group, c)})" for c in named]
        lines.append(f"- `{group}=` {', '.join(choices)}")
    return "\n".join(lines)


def method_table(catalogue: Catalogue) -> str:
    """The methods, with the properties that their classes state."""
    head = "| `method=` | what it is | networks | structure, weights | draws | closed form | joint scores | evidence |"
    rows = [head, "|---|---|--:|---|---|---|---|---|"]
    for choice in catalogue.choices("method"):
        method: Any = build({k: v for k, v in catalogue.load("method", choice).items() if k != BLOCKS["method"]})
        structure = ", ".join(getattr(method, key) for key in ("structure", "weights") if hasattr(method, key)) or "–"
        number = len(method.needs())
        draws = f"its {number}" if method.finite else "any number" if method.predictive == "draws" else "–"
        joint = "exact" if method.finite else "by draws" if method.predictive == "draws" else "regression, exact"
        form = "–" if method.predictive == "draws" else "regression exact, classes probit"
        if number == 1 and not method.finite and getattr(method, "predict", "") == "draws":
            form = "regression, in addition to draws"
        cells = [
            f"`{choice}`",
            catalogue.help_line("method", choice),
            number,
            structure,
            draws,
            form,
            joint,
            "yes" if method.uses_hyper else "–",
        ]
        rows.append("| " + " | ".join(map(str, cells)) + " |")
    return "\n".join(rows)


# ------------------------------------------------------------------------------------ outputs


def outputs() -> dict[str, str]:
    """Output of the README's commands in an empty folder; figures are kept in outputs/results/."""
    RESULTS.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        first = run(folder, "bnn-run")
        [bands] = folder.glob("outputs/runs/gap1d/*/*/*/figures/bands.png")
        shutil.copy(bands, RESULTS / "bands.png")
        shutil.rmtree(folder / "outputs")
        run(folder, "bnn-run", "-m", "experiment=yacht_methods")
        report = run(folder, "bnn-report", "--name", "yacht")
        for path in (folder / "outputs" / "results").iterdir():
            if path.suffix != ".html":  # the page is large, and the other files have all of its content
                shutil.copy(path, RESULTS / path.name)
    rows = [line for line in report.splitlines() if line.startswith("|")]
    return {"first-run": f"```text\n{abbreviated(first)}\n```", "yacht": "\n".join(rows)}


def run(folder: Path, program: str, *words: str) -> str:
    """Standard output of a command of this environment. Raises SystemExit if it fails."""
    print(f"running {program} {' '.join(words)}", file=sys.stderr)
    done = subprocess.run([BIN / program, *words], cwd=folder, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise SystemExit(
            f"{program} {' '.join(words)} failed with exit code {done.returncode}:\n{done.stdout}{done.stderr}"
        )
    return done.stdout


def abbreviated(text: str) -> str:
    """The lines that SHOWN matches, without the notes after the column n."""
    return "\n".join(NOTE.sub("", line) for line in text.splitlines() if SHOWN.search(line))


def closing_line() -> str:
    """The last line of plain pytest, in a new process."""
    environment = {**os.environ, "COLUMNS": "100"}
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q"], cwd=ROOT, capture_output=True, text=True, env=environment, check=False
    )
    return f"```text\n{done.stdout.rstrip().splitlines()[-1]}\n```"


if __name__ == "__main__":
    sys.exit(main())
