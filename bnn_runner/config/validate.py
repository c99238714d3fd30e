"""The first check of a command line, before heavy imports: all usage errors at once, with what to type instead."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bnn_runner.config.canonical import canonical
from bnn_runner.config.groups import GLOBAL_GROUPS, RECOMMENDED, Catalogue, flatten, merge
from bnn_runner.config.key_checks import is_key_of_some, key_problems, where_it_exists
from bnn_runner.config.optional_keys import without_mark
from bnn_runner.config.overrides import UNKNOWN, Override, parse, quote
from bnn_runner.config.recommend import Expanded, Resolved, expanded_at, find, keys_of, resolve, with_user_class
from bnn_runner.config.schema import check_fields, show
from bnn_runner.config.settings import EvalSettings, NoiseSettings, Settings, read_settings
from bnn_runner.config.where_rules import SIZES, SMALL, has_size, settings_where
from bnn_runner.errors import UserError, did_you_mean

MAX_POINTS = 2000  # combinations of swept choices that are checked one by one


@dataclass(frozen=True)
class Checked:
    """A command line without errors.

    Attributes:
        catalogue: The groups and choices.
        overrides: The overrides of the command line and of the sweeps in experiment files.
        points: One for every combination of swept choices.
        jobs: Number of jobs of the sweep; 1 without one.
        tree: Top-level key -> value (the first of a sweep).
    """

    catalogue: Catalogue
    overrides: tuple[Override, ...]
    points: tuple[Resolved, ...]
    jobs: int
    tree: dict[str, Any]

    def expanded(self) -> Expanded:
        """Returns the overrides with recommendations added; for a command line without sweeps."""
        return expanded_at(self.catalogue, self.overrides, self.points[0])


def check(overrides: Sequence[str], config_dirs: Sequence[Path | str] = (), multirun: bool = False) -> Checked:
    """Parses and checks overrides.

    Args:
        overrides: The overrides as typed.
        config_dirs: Folders with further choices.
        multirun: Whether sweeps are allowed (-m).

    Raises:
        UserError: With every problem of the command line.
    """
    catalogue = Catalogue(config_dirs)
    problems: list[str] = catalogue.header_problems()
    parsed: list[Override] = []
    for text in overrides:
        try:
            parsed.append(parse(text))
        except UserError as error:
            problems += [_bare_word(catalogue, text) or p for p in error.problems]
    parsed, new_problems = canonical(catalogue, with_user_class(parsed))
    problems += new_problems
    hydra, ours = [o for o in parsed if _is_hydra(o)], [o for o in parsed if not _is_hydra(o)]
    problems += [_hydra_problem(o) for o in hydra if _hydra_problem(o)]

    for override in ours:
        problems += _choice_problems(catalogue, override)
    valid = [o for o in ours if not _choice_problems(catalogue, o)]
    experiment_sweeps, new_problems = _experiment_sweeps(catalogue, valid, multirun)
    problems += new_problems
    points, new_problems = _points(catalogue, [*experiment_sweeps, *valid])
    problems += new_problems
    problems += [_sweep_problem(catalogue, o, points) for o in ours if o.sweep and not multirun]
    with_keys = [o for o in ours if o.key not in catalogue.groups and (multirun or not o.sweep)]
    only_some = [o for o in with_keys if is_key_of_some(catalogue, o, points)]
    for override in [*experiment_sweeps, *with_keys]:
        new_problems = key_problems(catalogue, override, points)
        if override in only_some[:1]:
            new_problems[-1] += " " + where_it_exists(only_some, parsed, config_dirs, multirun)
        problems += new_problems
    if multirun and not any(o.key == "hydra/sweeper" for o in hydra):
        problems += [_interval_problem(o) for o in ours if o.sweep and (o.raw or "").strip().startswith("interval(")]
    tree = _tree(catalogue, valid, points)
    problems += _setting_problems(tree)
    for override in ours:
        if override.sweep and override.key.split(".")[0] in catalogue.base:
            for value in override.values[1:]:
                problems += _setting_problems(_assign(tree, override.key, value)) if value is not UNKNOWN else []
    if problems:
        raise UserError(*dict.fromkeys(problems))
    parsed = [without_mark(catalogue, o, points) for o in parsed]
    all_overrides = (*experiment_sweeps, *parsed)
    jobs = math.prod(len(o.values) for o in all_overrides if o.sweep)
    return Checked(catalogue, all_overrides, tuple(points), jobs, tree)


def _is_hydra(override: Override) -> bool:
    return override.key == "hydra" or override.key.startswith(("hydra.", "hydra/"))


def _hydra_problem(override: Override) -> str:
    if override.key == "hydra.searchpath":
        return "hydra.searchpath is not supported. Add a folder of your own choices with --config-dir FOLDER."
    if override.key == "hydra.mode":
        return f"{override.text} is not supported. Write -m for a sweep, and nothing for a single run."
    if override.optional:
        return f"{override.text}: only a run's own keys can be set with ?=. Write {override.key}={override.raw}."
    if override.prefix != "~" and ("/" in override.key or override.key == "hydra") and override.value is None:
        return f"{override.text} chooses nothing. Remove it to use the default."
    return ""


def _interval_problem(override: Override) -> str:
    return (
        f"{override.text}: a sweep runs every value, and an interval has no list of them. Write them with commas, or "
        "search with hydra/sweeper=optuna and objective=val/marginal_loglik."
    )


def _bare_word(catalogue: Catalogue, text: str) -> str | None:
    """A better message for a word without '='; None for other texts."""
    if "=" in text.strip("="):
        return None
    word = text.strip("-= ")
    groups = [g for g in catalogue.groups if word in catalogue.groups[g] and word != RECOMMENDED]
    if groups:
        return f"{text!r} is not an override. Did you mean {' or '.join(f'{g}={word}' for g in groups)}?"
    if word in catalogue.groups or word in flatten(catalogue.base):
        return f"{text!r} has no value. Write {word}=..., without spaces around the '='."
    near = [f"{g}={c}" for g in catalogue.groups for c in catalogue.groups[g] if did_you_mean(word, [c])]
    hint = f" Did you mean {' or '.join(near[:3])}?" if near else ""
    return f"{text!r} is not an override. Write key=value.{hint} See bnn-run --help."


def _choice_problems(catalogue: Catalogue, override: Override) -> list[str]:
    """Problems of an override `group=choice`; none for other keys."""
    if override.key not in catalogue.groups:
        return []
    group = override.key
    optional = group in GLOBAL_GROUPS or group == "metric"
    listed = ", ".join(catalogue.choices(group))
    if override.optional:
        return [f"{override.text}: {group} is a choice that every run has. Write {group}={override.raw}."]
    if UNKNOWN in override.values and not override.sweep:
        return [f"{group} must be one name; got {override.raw}, which is not known before the run. Choices: {listed}."]
    if override.prefix == "~":
        return [] if optional else [f"~{group} removes a required choice. Choose one: {listed}."]
    problems = []
    for value in override.values:
        for name in value if isinstance(value, list) and optional else [value]:
            if name is UNKNOWN or (name is None and optional):
                continue
            if isinstance(name, (list, dict)):
                problems.append(f"{group} must be one name; got {override.raw}. Choices: {listed}.")
                continue
            problem = catalogue.problem_with(group, "null" if name is None else str(name))
            problems += [problem] if problem else []
    return problems


def _sweep_problem(catalogue: Catalogue, override: Override, points: Sequence[Resolved]) -> str:
    group = override.key.split(".")[0]
    raw = (override.raw or "").strip()
    if override.key == "metric":
        raw = ",".join(show(v) for v in override.values)
        return (
            f"{override.text} has several values, which makes a sweep. Write metric=[{raw}] to compute all of them in "
            "one run."
        )
    default, _ = find(catalogue.base, override.key) if group in catalogue.base else (None, False)
    for point in points[:1]:
        if group in catalogue.groups:
            default, _ = find(keys_of(catalogue, group, point.choices), override.key.partition(".")[2])
    remedies = ["Add -m to run them all"]
    if isinstance(default, list):
        remedies.append(f"write {override.key}=[{raw}] for a list")
    if (default is None or isinstance(default, str)) and override.key not in catalogue.groups:
        remedies.append(f"write '{override.key}={quote(raw)}' for text with commas")
    return f"{override.text} has several values, which makes a sweep. {', or '.join(remedies)}."


def _experiment_sweeps(
    catalogue: Catalogue, overrides: Sequence[Override], multirun: bool
) -> tuple[list[Override], list[str]]:
    """The sweeps in experiment files (hydra.sweeper.params) as overrides, and problems."""
    problems: list[str] = []
    params: dict[str, Any] = {}
    names: list[str] = []
    sizes = next((o.values for o in overrides if o.key == "size"), (SMALL,))
    defined_sizes = [SMALL]
    for override in overrides:
        if override.key in GLOBAL_GROUPS and override.prefix != "~":
            for value in override.values:
                listed = value if isinstance(value, list) else [value]
                for name in (str(v) for v in listed if v is not None):
                    content = catalogue.load(override.key, name)
                    hydra, rules = content.get("hydra") or {}, content.get("where") or {}
                    defined_sizes += [size for size in SIZES if has_size(rules, size)]
                    swept = (hydra.get("sweeper") or {}).get("params") or {}
                    swept = swept | {k: v for k, v in settings_where(rules, {"size": sizes[0]}).items() if k in swept}
                    if swept and override.sweep:
                        problems.append(
                            f"{override.text} sweeps over {name}, which is itself a sweep. Run {override.key}={name} "
                            "separately."
                        )
                    params |= swept
                    names += [f"{override.key}={name}"] if swept else []
    if len(sizes) > 1:
        problems.append("size must be one value; the sizes of an experiment are separate commands. Write size=paper.")
    elif sizes[0] in SIZES and sizes[0] not in defined_sizes:
        there = ", ".join(dict.fromkeys(defined_sizes))
        problems.append(
            f"size={show(sizes[0])} is not defined by the chosen experiment, which has: {there}. Remove size=..., or "
            "choose one of these."
        )
    typed = {o.key for o in overrides}
    sweeps: list[Override] = []
    for key, value in params.items():
        if key not in typed:
            try:
                sweeps.append(parse(f"{key}={value}"))
            except UserError as error:
                problems += error.problems
    if names and not multirun and not set(params) <= typed:  # in a job of the sweep, every swept key is typed
        problems.append(f"{' and '.join(names)} is a sweep over {', '.join(params)}. Add -m to run all of it.")
        sweeps = []
    return sweeps, problems


def _points(catalogue: Catalogue, overrides: Sequence[Override]) -> tuple[list[Resolved], list[str]]:
    """Every combination of swept choices with its recommendations, and problems."""
    choices = [o for o in overrides if o.key in catalogue.groups]
    others = [o.single(o.values[0]) if o.sweep else o for o in overrides if o.key not in catalogue.groups]
    points: list[Resolved] = []
    problems: list[str] = []
    options = [[o.single(v) for v in o.values if v is not UNKNOWN] if o.sweep else [o] for o in choices]
    for combination in itertools.islice(itertools.product(*options), MAX_POINTS):
        try:
            points.append(resolve(catalogue, [*combination, *others]))
        except UserError as error:
            problems += error.problems
    return points, problems


def _tree(catalogue: Catalogue, overrides: Sequence[Override], points: Sequence[Resolved]) -> dict[str, Any]:
    """Top-level keys with their values (the first of a sweep)."""
    tree = dict(catalogue.base)
    for point in points[:1]:
        tree = merge(tree, {k: v for k, v in point.body.items() if k not in catalogue.groups})
        for text in point.additions:
            override = parse(text)
            if override.key.split(".")[0] in catalogue.base:
                tree = _assign(tree, override.key, override.value)
    for override in overrides:
        not_a_mapping = override.value is None and isinstance(catalogue.base.get(override.key), dict)
        unknown = override.value is UNKNOWN or not_a_mapping or not override.values
        if override.key.split(".")[0] in catalogue.base and not unknown:
            tree = _assign(tree, override.key, override.value)
    return tree


def _assign(tree: dict[str, Any], key: str, value: Any) -> dict[str, Any]:
    first, _, rest = key.partition(".")
    below = tree.get(first)
    if rest:
        return tree | {first: _assign(below if isinstance(below, dict) else {}, rest, value)}
    return tree | {first: merge(below, value) if isinstance(below, dict) and isinstance(value, dict) else value}


def _setting_problems(tree: dict[str, Any]) -> list[str]:
    """Problems of top-level values; unknown keys are reported by `key_problems`."""
    known = {k: v for k, v in tree.items() if k in Settings.__dataclass_fields__}
    if isinstance(known.get("eval"), dict):
        known["eval"] = {k: v for k, v in known["eval"].items() if k in EvalSettings.__dataclass_fields__}
    _, problems = read_settings(known, Path.cwd())
    likelihood = tree.get("likelihood")
    values = likelihood if isinstance(likelihood, dict) else {}
    noise = {k: v for k, v in values.items() if k in NoiseSettings.__dataclass_fields__}
    return problems + check_fields(NoiseSettings, noise, "likelihood.", "")[1]
