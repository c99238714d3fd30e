"""The first look at a command line, before anything heavy is imported: every mistake at once, with what to type."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bnn_runner.config.groups import GLOBAL_GROUPS, RECOMMENDED, Catalogue, flatten, merge
from bnn_runner.config.overrides import UNKNOWN, Override, parse, quote
from bnn_runner.config.recommend import Expanded, Resolved, expanded_at, keys_of, resolve, with_own_class
from bnn_runner.config.schema import check_fields, show
from bnn_runner.config.settings import COMPONENTS, EvalSettings, NoiseSettings, Settings, read_settings
from bnn_runner.config.where_rules import SIZES, SMALL, has_size, settings_where
from bnn_runner.errors import UserError, did_you_mean

MAX_POINTS = 2000  # of the product of swept choices that are looked at one by one


@dataclass(frozen=True)
class Checked:
    """A command line without mistakes: its overrides, the points of its swept choices, how many jobs it makes."""

    catalogue: Catalogue
    overrides: tuple[Override, ...]
    points: tuple[Resolved, ...]
    jobs: int
    tree: dict[str, Any]

    def expanded(self) -> Expanded:
        """The overrides in full; for a command line without sweeps."""
        return expanded_at(self.catalogue, self.overrides, self.points[0])


def check(overrides: Sequence[str], config_dirs: Sequence[Path | str] = (), multirun: bool = False) -> Checked:
    """Read and check overrides. Raises one `UserError` with every mistake found."""
    catalogue = Catalogue(config_dirs)
    problems: list[str] = catalogue.header_problems()
    parsed: list[Override] = []
    for text in overrides:
        try:
            parsed.append(parse(text))
        except UserError as error:
            problems += [_bare_word(catalogue, text) or p for p in error.problems]
    parsed = with_own_class(parsed)
    hydra, own = [o for o in parsed if _is_hydra(o)], [o for o in parsed if not _is_hydra(o)]
    problems += [_hydra_problem(o) for o in hydra if _hydra_problem(o)]

    for override in own:
        problems += _choice_problems(catalogue, override)
    good = [o for o in own if not _choice_problems(catalogue, o)]
    swept, found = _experiment_sweeps(catalogue, good, multirun)
    problems += found
    points, found = _points(catalogue, [*swept, *good])
    problems += found
    problems += [_sweep_problem(catalogue, o, points) for o in own if o.sweep and not multirun]
    for override in [*swept, *(o for o in own if o.key not in catalogue.groups and (multirun or not o.sweep))]:
        problems += _key_problems(catalogue, override, points)
    tree = _tree(catalogue, good, points)
    problems += _setting_problems(tree)
    for override in own:
        if override.sweep and override.key.split(".")[0] in catalogue.base:
            for value in override.values[1:]:
                problems += _setting_problems(_assign(tree, override.key, value)) if value is not UNKNOWN else []
    if problems:
        raise UserError(*dict.fromkeys(problems))
    everything = [*swept, *parsed]
    jobs = math.prod(len(o.values) for o in everything if o.sweep)
    return Checked(catalogue, tuple(everything), tuple(points), jobs, tree)


def _is_hydra(override: Override) -> bool:
    return override.key == "hydra" or override.key.startswith(("hydra.", "hydra/"))


def _hydra_problem(override: Override) -> str:
    if override.key == "hydra.searchpath":
        return "hydra.searchpath is not supported. Add a folder of your own choices with --config-dir FOLDER."
    return ""


def _bare_word(catalogue: Catalogue, text: str) -> str | None:
    """A better message for words that are no override at all."""
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
    """What is wrong with `group=choice`; nothing for other keys."""
    if override.key not in catalogue.groups:
        return []
    group = override.key
    optional = group in GLOBAL_GROUPS or group == "metric"
    listed = ", ".join(catalogue.choices(group))
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
        return f"{override.text} has several values, which makes a sweep. Write metric=[{raw}] to have all in one run."
    default, _ = _find(catalogue.base, override.key) if group in catalogue.base else (None, False)
    for point in points[:1]:
        if group in catalogue.groups:
            default, _ = _find(keys_of(catalogue, group, point.choices), override.key.partition(".")[2])
    ways = ["Add -m to run them all"]
    if isinstance(default, list):
        ways.append(f"write {override.key}=[{raw}] for a list")
    if (default is None or isinstance(default, str)) and override.key not in catalogue.groups:
        ways.append(f"write '{override.key}={quote(raw)}' for a text with commas")
    return f"{override.text} has several values, which makes a sweep. {', or '.join(ways)}."


def _experiment_sweeps(
    catalogue: Catalogue, overrides: Sequence[Override], multirun: bool
) -> tuple[list[Override], list[str]]:
    """Sweeps that experiment files bring along (hydra.sweeper.params), as overrides."""
    problems: list[str] = []
    params: dict[str, Any] = {}
    names: list[str] = []
    sizes = next((o.values for o in overrides if o.key == "size"), (SMALL,))
    sized = [SMALL]
    for override in overrides:
        if override.key in GLOBAL_GROUPS and override.prefix != "~":
            for value in override.values:
                listed = value if isinstance(value, list) else [value]
                for name in (str(v) for v in listed if v is not None):
                    content = catalogue.load(override.key, name)
                    own, rules = content.get("hydra") or {}, content.get("where") or {}
                    sized += [str(s) for s in sizes if has_size(rules, str(s))]
                    found = (own.get("sweeper") or {}).get("params") or {}
                    found = found | {k: v for k, v in settings_where(rules, {"size": sizes[0]}).items() if k in found}
                    if found and override.sweep:
                        problems.append(
                            f"{override.text} sweeps over {name}, which is itself a sweep. Run {override.key}={name} "
                            "separately."
                        )
                    params |= found
                    names += [f"{override.key}={name}"] if found else []
    if len(sizes) > 1:
        problems.append("size must be one value; the sizes of an experiment are separate commands. Write size=paper.")
    elif sizes[0] in SIZES and sizes[0] not in sized:
        problems.append(f"size={show(sizes[0])} is not defined by the chosen experiment. Remove size=...")
    typed = {o.key for o in overrides}
    sweeps: list[Override] = []
    for key, value in params.items():
        if key not in typed:
            try:
                sweeps.append(parse(f"{key}={value}"))
            except UserError as error:
                problems += error.problems
    if names and not multirun and not set(params) <= typed:  # a job of the sweep has a value for each
        problems.append(f"{' and '.join(names)} is a sweep over {', '.join(params)}. Add -m to run all of it.")
        sweeps = []
    return sweeps, problems


def _points(catalogue: Catalogue, overrides: Sequence[Override]) -> tuple[list[Resolved], list[str]]:
    """Every combination of swept choices, with what is recommended there."""
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
    """Top-level keys with their effective values (the first value of a sweep)."""
    tree = dict(catalogue.base)
    for point in points[:1]:
        tree = merge(tree, {k: v for k, v in point.body.items() if k not in catalogue.groups})
        for text in point.additions:
            override = parse(text)
            if override.key.split(".")[0] in catalogue.base:
                tree = _assign(tree, override.key, override.value)
    for override in overrides:
        if override.key.split(".")[0] in catalogue.base and override.values and override.value is not UNKNOWN:
            tree = _assign(tree, override.key, override.value)
    return tree


def _assign(tree: dict[str, Any], key: str, value: Any) -> dict[str, Any]:
    first, _, rest = key.partition(".")
    below = tree.get(first)
    if rest:
        return tree | {first: _assign(below if isinstance(below, dict) else {}, rest, value)}
    return tree | {first: merge(below, value) if isinstance(below, dict) and isinstance(value, dict) else value}


def _setting_problems(tree: dict[str, Any]) -> list[str]:
    """Top-level values against their full signatures (these are light); unknown keys are reported elsewhere."""
    known = {k: v for k, v in tree.items() if k in Settings.__dataclass_fields__}
    if isinstance(known.get("eval"), dict):
        known["eval"] = {k: v for k, v in known["eval"].items() if k in EvalSettings.__dataclass_fields__}
    _, problems = read_settings(known, Path.cwd())
    likelihood = tree.get("likelihood")
    noise = likelihood if isinstance(likelihood, dict) else {}
    fields = {k: v for k, v in noise.items() if k in NoiseSettings.__dataclass_fields__}
    return problems + check_fields(NoiseSettings, fields, "likelihood.", "")[1]


def _key_problems(catalogue: Catalogue, override: Override, points: Sequence[Resolved]) -> list[str]:
    """Whether a key is there at every point, and takes the type of its default."""
    key = override.key
    group, _, rest = key.partition(".")
    if override.prefix == "~":
        return [f"{override.text} removes a required key. Set it to another value instead."]
    if override.package and key not in catalogue.groups:
        return [f"{override.text}: only groups take a package (@). Groups: {', '.join(catalogue.groups)}."]
    if group not in catalogue.groups:
        tree = catalogue.base
        if key in tree or key in flatten(tree):
            return []
        return [_unknown_key(catalogue, key, points)]
    if not rest:
        return []
    problems = []
    for point in points:
        leaves = keys_of(catalogue, group, point.choices)
        default, exists = _find(leaves, rest)
        if exists:
            problems += _type_problem(override, default)
        elif not override.prefix and not catalogue.is_open(group, point.choices.get(group)):
            problems.append(_unknown_key(catalogue, key, [point]))
    if override.prefix == "+" and points and all(_find(keys_of(catalogue, group, p.choices), rest)[1] for p in points):
        problems.append(f"{override.text} adds a key that exists already. Remove the '+'.")
    return list(dict.fromkeys(problems))


def _find(tree: dict[str, Any], dotted: str) -> tuple[Any, bool]:
    value: Any = tree
    for part in dotted.split("."):
        if not isinstance(value, dict) or part not in value:
            # below a key whose default is null or {} anything may stand: the signature check has the word
            return None, value is None or value == {}
        value = value[part]
    return value, True


def _unknown_key(catalogue: Catalogue, key: str, points: Sequence[Resolved]) -> str:
    group, _, rest = key.partition(".")
    known = list(flatten(catalogue.base))
    for point in points:
        for g in COMPONENTS:
            known += [f"{g}.{k}" for k in flatten(keys_of(catalogue, g, point.choices)) if not k.endswith("_target_")]
    known = list(dict.fromkeys(known))
    own = [k for k in known if k.startswith(f"{group}.")]
    near = did_you_mean(key, own) or did_you_mean(key, {*known, *catalogue.defaults, *catalogue.groups})
    if not near:
        last = [k for k in known if k.rpartition(".")[2] == key.rpartition(".")[2]]
        near = f" Did you mean {' or '.join(last[:3])}?" if last else ""
    if group in catalogue.groups and points:
        choice = points[0].choices.get(group)
        text = f"{key} is not a key of {group}={show(choice)}."
        others = [c for c in catalogue.choices(group) if c != choice]
        holders = [c for c in others if rest in flatten(keys_of(catalogue, group, {group: c}))]
        if holders and group != "metric":
            return f"{text} It is a key of {group}={', '.join(holders)}."
        listed = f" Keys of {group}={show(choice)}: {', '.join(own) or 'none'}." if group != "metric" else ""
        return text + (near or listed)
    return f"{key} is not a key.{near}" + ("" if near else " See bnn-run --help.")


def _type_problem(override: Override, default: Any) -> list[str]:
    """A value against the type of the YAML default; null defaults and null values tell nothing."""
    problems = []
    for value in override.values:
        if value is UNKNOWN or value is None or default is None:
            continue
        wanted = ""
        if isinstance(default, bool):
            wanted = "" if isinstance(value, bool) else "true or false"
        elif isinstance(default, (int, float)):
            fits = isinstance(value, (int, float)) and not isinstance(value, bool)
            fits = fits or value == "auto"
            wanted = "" if fits else "a whole number" if isinstance(default, int) else "a number"
        elif isinstance(default, list):
            wanted = "" if isinstance(value, list) else f"a list, as in {override.key}=[{show(value)}]"
        elif isinstance(default, dict):
            wanted = "" if isinstance(value, dict) else "a mapping {key:value}"
        elif isinstance(default, str) and default != "auto" and not isinstance(value, str):
            wanted = f"text; if it is meant as text, quote it twice: '{override.key}={quote(show(value))}'"
        if wanted:
            problems.append(f"{override.key} must be {wanted} (default {show(default)}); got {show(value)}.")
    return problems
