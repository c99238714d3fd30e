"""Updates the generated parts of the README: tables from the configuration, and the output of its commands.

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

import yaml

from bnn_runner.cli.help import settings_lines
from bnn_runner.config.groups import BLOCKS, Catalogue
from bnn_runner.experiment import build

ROOT = Path(__file__).resolve().parents[1]
README = ROOT / "README.md"
RESULTS = ROOT / "outputs" / "results"
BIN = Path(sys.executable).parent

UCI = ("UCI regression, ", "UCI classification, ")

# The README shows these lines of the default run's output, without the notes after the column n.
NOTE = re.compile(r"(?<=\d)  S/4 .*")
SHOWN = re.compile(
    r"^(data|model)=|^log evidence|^  metric|^(fit|joint|calibration|out of)|^(cell|seconds) |bands\.png"
    r"|^  (marginal_loglik ↑|rmse|joint_loglik tau=10|dyadic_loglik kappa=2 |coverage_90|ood_auroc \(ood/gap)"
)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="change nothing; exit code 1 if a table is out of date")
    parser.add_argument("--run", action="store_true", help="also the output of the commands, and the figures")
    parser.add_argument("--tests", action="store_true", help="also the last line of pytest")
    arguments = parser.parse_args()
    before = README.read_text(encoding="utf-8")
    parts = tables()
    if arguments.run:
        parts |= outputs()
    if arguments.tests:
        parts["tests"] = closing_line()
    after = put(before, parts)
    if arguments.check:
        if after != before:
            print("README.md is out of date. Run: python scripts/readme_outputs.py", file=sys.stderr)
        return int(after != before)
    README.write_text(after, encoding="utf-8")
    print(f"README.md: {', '.join(parts)}{'' if after != before else ' (nothing changed)'}")
    return 0


def put(text: str, parts: dict[str, str]) -> str:
    """`text` with each named part between its markers. Raises SystemExit if a marker is missing."""
    for name, content in parts.items():
        begin, end = f"<!-- begin {name} -->", f"<!-- end {name} -->"
        if text.count(begin) != 1 or text.count(end) != 1:
            raise SystemExit(f"README.md must have {begin} and {end}, once each.")
        head, rest = text.split(begin)
        text = f"{head}{begin}\n{content.strip()}\n{end}{rest.split(end)[1]}"
    return text


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
        "presets": preset_table(),
        "ensembles": kept_table("uci_ensemble", "data", "quantity", "ours", "published", "n", "verdict", "source"),
        "gap": kept_table("gap_methods", "method", "W1, all points", "in the gap", "sd / HMC's, gap", "R-hat", "note"),
    }


def preset_table() -> str:
    """The presets of scripts/reproduce.py and what they cost."""
    presets = yaml.safe_load((ROOT / "scripts" / "presets.yaml").read_text(encoding="utf-8"))
    rows = [f"| `{p['name']}` | {p['what']} | {p['minutes']['small']} | {p['minutes']['paper']} |" for p in presets]
    return "\n".join(["| preset | | minutes of one core, small | paper's size |", "|---|---|--:|---|", *rows])


def kept_table(name: str, *columns: str) -> str:
    """Some columns of the last table of outputs/results/<name>.md."""
    text = (RESULTS / f"{name}.md").read_text(encoding="utf-8")
    lines = re.findall(r"(?:^\|.*\n)+", text, re.MULTILINE)[-1].splitlines()
    table = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    kept = [table[0].index(column) for column in columns]
    return "\n".join(f"| {' | '.join(row[i] for i in kept)} |" for row in table)


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
