"""The help texts of bnn-run, generated from the comments in the YAML files. Imports neither Hydra nor torch."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bnn_runner.config.groups import BLOCKS, GLOBAL_GROUPS, RECOMMENDED, Catalogue, flatten
from bnn_runner.config.overrides import to_text
from bnn_runner.errors import UserError, did_you_mean

_INTRO = """\
bnn-run - run experiments with Bayesian neural networks

Choose a data set, a model, an inference method, a training schedule and hyperparameter rules by name. bnn-run trains,
fits the posterior, computes marginal and joint log-likelihoods, and writes tables and figures to outputs/. Anything you
don't set uses the data set's recommended value.

Usage:
  bnn-run [GROUP=CHOICE ...] [KEY=VALUE ...] [-m] [--config-dir FOLDER]
  bnn-run --help GROUP          one group in full, with what each key means: method, data, model, hyper, metric, ...
  bnn-run --help GROUP=CHOICE   one choice
  bnn-run --help settings       the settings that belong to no group

Examples:
  bnn-run                                                      the default: seconds, no download
  bnn-run method=laplace_kfac data=mnist model=lenet           KFAC Laplace of LeNet on MNIST
  bnn-run -m method=map,ensemble,laplace data=yacht seed=0,1,2   a sweep of nine runs; run it again to resume
"""

_OPTIONS = """\
Options:
  -m, --multirun       run every combination of comma-separated values
  --config-dir FOLDER  add your own choices: FOLDER/<group>/<choice>.yaml, with allow=[package] for your classes
  --cfg job            show the composed configuration and stop
  -h, --help           this text        --hydra-help  Hydra's own flags
  --version            the version

KEY?=VALUE sets a key only in the runs that have it: -m method=map,laplace 'method.structure?=kfac'
Quote values that contain = , { } or spaces twice: 'data_dir="/mnt/a=1"'.
Next: bnn-report makes tables and figures of all runs, bnn-predict predicts for new data.
"""

_GROUPS = {
    "data": "the data set",
    "model": "the network",
    "method": "the inference method",
    "prior": "the prior used in training",
    "hyper": "the rule that chooses the posterior's prior precision",
    "schedule": "the optimiser and its learning rate",
    "augment": "augmentation of training images",
    "logger": "where finished runs are logged as well",
    "metric": "scores; one run computes all of them, or those of metric=[a,b]",
    "experiment": "a preset: choices, settings and often a sweep",
    "debug": "a quick run that only tests whether everything works",
}


def help_text(config_dirs: Sequence[Path | str] = (), topic: str | None = None) -> str:
    """Returns the overview, or the full help of one topic.

    Args:
        config_dirs: Folders with further choices.
        topic: A group, a choice as GROUP=CHOICE, or 'settings'; None for the overview.

    Raises:
        UserError: For an unknown topic.
    """
    catalogue = Catalogue(config_dirs)
    if topic is None:
        return _overview(catalogue)
    if topic == "settings":
        return "\n".join(["Settings (KEY=VALUE; the default is shown):", *_setting_lines(catalogue)])
    group, _, choice = topic.partition("=")
    if choice and group in catalogue.groups and (problem := catalogue.problem_with(group, choice)):
        raise UserError(problem)
    if group not in catalogue.groups:
        topics = [*catalogue.groups, "settings"]
        raise UserError(
            f"--help has no topic {group!r}.{did_you_mean(group, topics)} Topics: {', '.join(sorted(topics))}."
        )
    if choice:
        return "\n".join(_choice_lines(catalogue, group, choice, in_full=True))
    lines = [f"{group}: {_GROUPS.get(group, 'your own group')}", ""]
    for name in catalogue.choices(group):
        lines += [*_choice_lines(catalogue, group, name), ""]
    return "\n".join(lines).rstrip()


def _overview(catalogue: Catalogue) -> str:
    lines = [_INTRO, "Choices (GROUP=CHOICE; * is the default):"]
    order = [*catalogue.defaults, *(g for g in catalogue.groups if g not in catalogue.defaults)]
    for group in order:
        choices = catalogue.choices(group)
        if not choices:
            continue
        lines.append(f"  {group}: {_GROUPS.get(group, 'your own group')}")
        width = max(16, *(len(c) for c in choices))
        for choice in choices:
            default = catalogue.defaults.get(group)
            star = "*" if choice == default or default == [] else " "
            lines.append(f"   {star}{choice:<{width}}  {catalogue.help_line(group, choice)}".rstrip())
    lines += ["", "Settings (KEY=VALUE; the default is shown):", *_setting_lines(catalogue)]
    return "\n".join([*lines, "", _OPTIONS])


def _setting_lines(catalogue: Catalogue) -> list[str]:
    return [f"  {key + '=' + value:<27} {meaning}".rstrip() for key, value, meaning in settings_lines(catalogue)]


def settings_lines(catalogue: Catalogue) -> list[tuple[str, str, str]]:
    """Returns (key, default, meaning) of the top-level keys; the meaning is the key's comment in config.yaml."""
    tree = flatten(catalogue.base | catalogue.shared)
    comments = key_comments(catalogue.dirs[0] / "config.yaml")
    return [(key, to_text(tree[key]), comments[key]) for key in comments if key in tree]


def _choice_lines(catalogue: Catalogue, group: str, choice: str, in_full: bool = False) -> list[str]:
    """Lines for a choice and its keys; for a variant only the keys that differ from its base, unless `in_full`."""
    tree = choice_keys(catalogue, group, choice)
    base = catalogue.base_of(group, choice)
    lines = [f"{choice}  {catalogue.help_line(group, choice)}"]
    if choice == RECOMMENDED or not tree:
        return lines
    if base is not None and not in_full:
        shown = {k: v for k, v in tree.items() if choice_keys(catalogue, group, base).get(k, ...) != v}
        lines.append(f"    like {base}" + (", with" if shown else ""))
    else:
        shown = tree
    explained = meanings(catalogue, group, choice)
    prefix = "" if group in ("experiment", "debug") else f"metric.{choice}." if group == "metric" else f"{group}."
    for key, value in shown.items():
        lines.append(f"    {f'{prefix}{key}={to_text(value)}':<36} {explained.get(key, '')}".rstrip())
    return lines


def choice_keys(catalogue: Catalogue, group: str, choice: str) -> dict[str, Any]:
    """Returns the dotted keys and defaults of a choice, without its class and the blocks that are not keys."""
    blocks = ("hydra", "where") if group in GLOBAL_GROUPS else ()
    tree = {k: v for k, v in catalogue.load(group, choice).items() if k not in blocks}
    tree.pop(BLOCKS.get(group, ""), None)
    return {k: v for k, v in flatten(tree).items() if k.rpartition(".")[2] != "_target_"}


def meanings(catalogue: Catalogue, group: str, choice: str) -> dict[str, str]:
    """Returns dotted key -> comment after it, from the choice's file and those of its bases."""
    base = catalogue.base_of(group, choice)
    inherited = {} if base is None else meanings(catalogue, group, base)
    return inherited | {k: m for k, m in key_comments(catalogue.groups[group][choice]).items() if m}


def key_comments(path: Path) -> dict[str, str]:
    """Returns dotted key -> comment after it, for the keys of a YAML file that have a value on the same line."""
    comments: dict[str, str] = {}
    parents: list[tuple[int, str]] = []
    for line in path.read_text(encoding="utf-8").splitlines():
        match = re.match(r"( *)([A-Za-z_][\w.]*):(?:\s+([^#\s][^#]*?))?\s*(?:#\s*(.*))?$", line)
        if match is None:
            continue
        indent, key, value, comment = match.groups()
        parents = [(depth, name) for depth, name in parents if depth < len(indent)]
        if value is None:
            parents.append((len(indent), key))
        else:
            comments[".".join([*(name for _, name in parents), key])] = comment or ""
    return comments
