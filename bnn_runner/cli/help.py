"""The help text of bnn-run, made from the YAML files' own comments. Imports neither Hydra nor torch."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

from bnn_runner.config.groups import Catalogue
from bnn_runner.config.overrides import to_text

_INTRO = """\
bnn-run - run experiments with Bayesian neural networks

Picks a data set, a model, an inference method, a training schedule and hyperparameter rules by name;
trains, fits the posterior, scores marginal and joint log-likelihoods, and leaves tables and figures
in outputs/. What a data set recommends is taken for everything that you do not choose.

Usage:
  bnn-run [GROUP=CHOICE ...] [KEY=VALUE ...] [-m] [--config-dir FOLDER]

Examples:
  bnn-run                                                      the default: seconds, no download
  bnn-run method=laplace_kfac data=mnist model=lenet           KFAC Laplace of LeNet on MNIST
  bnn-run -m method=map,ensemble,laplace data=yacht seed=0,1,2   a sweep: nine runs; typed again it skips what is done
"""

_OPTIONS = """\
Options:
  -m, --multirun       run every combination of values with commas
  --config-dir FOLDER  add your own choices: FOLDER/<group>/<choice>.yaml, with allow=[package] for your classes
  --cfg job            show the composed configuration and stop
  -h, --help           this text        --hydra-help  Hydra's own flags
  --version            the version

Quote what has a meaning of its own (= , { } spaces) twice: 'data_dir="/mnt/a=1"'.
After the runs: bnn-report makes the tables and figures over all of them, bnn-predict predicts for new data.
"""


def help_text(config_dirs: Sequence[Path | str] = ()) -> str:
    """The whole text: what it does, each group's choices with a line each, top-level keys, examples."""
    catalogue = Catalogue(config_dirs)
    lines = [_INTRO, "Choices (GROUP=CHOICE; * is the default):"]
    order = [*catalogue.defaults, *(g for g in catalogue.groups if g not in catalogue.defaults)]
    for group in order:
        choices = catalogue.choices(group)
        if not choices:
            continue
        multiple = " (one run: [a,b])" if group == "metric" else ""
        lines.append(f"  {group}{multiple}")
        width = max(16, *(len(c) for c in choices))
        for choice in choices:
            default = catalogue.defaults.get(group)
            star = "*" if choice == default or default == [] else " "
            lines.append(f"   {star}{choice:<{width}}  {catalogue.help_line(group, choice)}".rstrip())
    lines += ["", "Settings (KEY=VALUE; the default is shown):"]
    lines += [f"  {key + '=' + value:<27} {meaning}".rstrip() for key, value, meaning in settings_lines(catalogue)]
    return "\n".join([*lines, "", _OPTIONS])


def settings_lines(catalogue: Catalogue) -> list[tuple[str, str, str]]:
    """(key, default, meaning) of the top-level keys; the meaning is the comment behind the key in config.yaml."""
    found = []
    parent = ""
    tree = catalogue.base | catalogue.shared
    for line in (catalogue.dirs[0] / "config.yaml").read_text(encoding="utf-8").splitlines():
        match = re.match(r"( *)([a-z_]+):(?:\s+([^#]+?))?\s*(?:#\s*(.*))?$", line)
        if match is None:
            continue
        indent, key, value, comment = match.groups()
        parent = parent if indent else key
        if parent not in tree or value is None:
            continue
        shown = value.strip() if not indent else to_text(tree[parent][key])
        found.append((f"{parent}.{key}" if indent else key, shown, comment or ""))
    return found
