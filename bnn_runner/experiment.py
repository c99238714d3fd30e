"""From overrides to an `Experiment`: composed by Hydra, built through an allow-list, checked against signatures.

Every problem of every component is collected into one `UserError` before any work.
"""

from __future__ import annotations

import dataclasses
import importlib
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hydra import compose as hydra_compose
from hydra import initialize_config_dir
from hydra.core.global_hydra import GlobalHydra
from hydra.errors import HydraException
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from bnn_runner.config.groups import BLOCKS, packaged_conf
from bnn_runner.config.overrides import expand, parse, quote, resolve, to_text
from bnn_runner.config.schema import check_fields, show
from bnn_runner.config.settings import COMPONENTS, EvalSettings, Settings, anchor, attempt, read_settings
from bnn_runner.config.validate import check
from bnn_runner.errors import UserError, did_you_mean, raise_all

if TYPE_CHECKING:
    from bnn_runner.base import Augmentation, HyperRule, Method, Model
    from bnn_runner.hyper.training_rule import TrainingRule
    from bnn_runner.loggers.base import Logger
    from bnn_runner.models.likelihoods import NoiseRule
    from bnn_runner.models.priors import Prior
    from bnn_runner.scoring import Metric
    from bnn_runner.tasks import DataSet, TaskSpec
    from bnn_runner.training.pretrained import PretrainedWeights
    from bnn_runner.training.schedules import Schedule

__all__ = ["EvalSettings", "Experiment", "Settings", "build", "compose", "load_experiment"]


@dataclass(frozen=True)
class Experiment:
    """One run, ready: the chosen objects, the settings, and the resolved configuration they came from.

    `given` are the networks trained elsewhere, by member; without them networks are trained here.
    `config` is plain (no `recommended`); `choices` names each group's choice (a list for metrics);
    `overrides` is the expanded list, which reproduces the run (with --config-dir `config_dir`)
    whatever is recommended later.
    """

    data: DataSet
    model: Model
    method: Method
    prior: Prior
    hyper: HyperRule
    schedule: Schedule
    augment: Augmentation
    logger: Logger
    metrics: dict[str, Metric]
    noise: NoiseRule
    settings: Settings
    config: dict[str, Any]
    choices: dict[str, Any]
    notes: tuple[str, ...] = ()
    overrides: tuple[str, ...] = ()
    config_dir: Path | None = None
    given: tuple[PretrainedWeights, ...] = ()

    @property
    def training_rule(self) -> TrainingRule | None:
        """The hyperparameter rule where it acts in training, and a network is trained at all."""
        from bnn_runner.hyper.training_rule import TrainingRule

        acts = isinstance(self.hyper, TrainingRule) and any(spec.trained for spec in self.method.needs())
        return self.hyper if acts and isinstance(self.hyper, TrainingRule) else None

    @property
    def uses_hyper(self) -> bool:
        """Whether the hyperparameter rule changes the result: the method goes by it, or the training does."""
        return self.method.uses_hyper or self.training_rule is not None


def compose(overrides: Sequence[str], config_dir: Path | str | None = None) -> dict[str, Any]:
    """The resolved configuration as plain containers, without `BLOCKS`; works inside a running Hydra job as well.

    Raises `UserError` for what Hydra or OmegaConf cannot make sense of.
    """
    extra = [] if config_dir is None else [f"hydra.searchpath=[{quote(str(Path(config_dir).resolve()))}]"]
    state = GlobalHydra.instance()
    running = state.hydra  # a job of a sweep must find its Hydra again
    state.clear()
    try:
        with initialize_config_dir(config_dir=str(packaged_conf()), version_base="1.3", job_name="bnn-run"):
            composed = hydra_compose("config", overrides=[*overrides, *extra])
        tree = OmegaConf.to_container(composed, resolve=True, throw_on_missing=True)
    except (HydraException, OmegaConfBaseException) as error:
        raise UserError(hydra_message(error)) from error
    finally:
        GlobalHydra.instance().hydra = running
    assert isinstance(tree, dict)
    for group, block in BLOCKS.items():
        if isinstance(tree.get(group), dict):
            tree[group].pop(block, None)
    return {str(k): v for k, v in tree.items() if k != "hydra"}


def hydra_message(error: BaseException) -> str:
    """What Hydra or OmegaConf says, in one paragraph, with its cause."""
    parts = [str(error)]
    if error.__cause__ is not None and str(error.__cause__) not in parts[0]:
        parts.append(str(error.__cause__))
    return " ".join(" ".join(parts).split())


def locate(target: Any, allow: Sequence[str], where: str) -> Any:
    """What a `_target_` names. Raises `UserError`, before anything is imported, unless its package is trusted."""
    if target is None:
        raise UserError(f"{where} needs a class of yours. Give it as {where}._target_=package.module.Class.")
    if not isinstance(target, str) or "." not in target:
        raise UserError(f"{where} has no usable _target_ ({target!r}). It must name package.module.Class.")
    package = target.split(".")[0]
    if package != "bnn_runner" and package not in allow:
        raise UserError(
            f"{where} uses {target}, and {package} is not a package that you trust yet."
            f" If you do, add allow=[{','.join([*allow, package])}]."
        )
    module_name, _, class_name = target.rpartition(".")
    try:
        module = importlib.import_module(module_name)
    except ImportError as error:
        missing = getattr(error, "name", None) or module_name
        raise UserError(
            f"{where}: {module_name} cannot be imported ({error}). Install {missing.split('.')[0]},"
            " or put its folder on PYTHONPATH or beside the folder given as --config-dir."
        ) from error
    found = getattr(module, class_name, None)
    if found is None:
        near = did_you_mean(class_name, [n for n, v in vars(module).items() if isinstance(v, type)])
        raise UserError(f"{where}: {module_name} has no {class_name}.{near} Mend the _target_.")
    return found


def build(node: Any, allow: Sequence[str] = (), where: str = "", what: str = "") -> Any:
    """The object a node's `_target_` and further keys describe.

    `where` is the dotted place of the node ('schedule') and `what` its choice ('schedule=adam'), for
    messages. Raises `UserError` with every problem: untrusted or missing class, unknown, missing or
    wrong fields, and what the class refuses.
    """
    if not isinstance(node, Mapping):
        raise UserError(
            f"{where or 'This node'} is {node!r}, and must be a mapping with a _target_. Choose one by name."
        )
    target = node.get("_target_")
    cls = locate(target, allow, where or str(target))
    if not (isinstance(cls, type) and dataclasses.is_dataclass(cls)):
        if where == "model" and callable(cls):
            from bnn_runner.models.module import own_module

            return own_module(cls, {k: v for k, v in node.items() if k != "_target_"}, str(target))
        raise UserError(f"{where}: {target} is not a dataclass. Its fields must be its YAML's keys: make it one.")
    values: dict[str, Any] = {}
    problems: list[str] = []
    prefix = f"{where}." if where else ""
    for key, value in node.items():
        if key == "_target_":
            continue
        if isinstance(value, Mapping) and "_target_" in value:
            try:
                value = build(value, allow, f"{prefix}{key}")
            except UserError as error:
                problems += error.problems
                continue
        values[key] = value
    arguments, found = check_fields(cls, values, prefix, what or where or cls.__name__)
    raise_all(problems + found)
    made, problems = attempt(cls, arguments)
    raise_all(problems)
    return made


def load_experiment(
    overrides: Sequence[str], config_dir: Path | str | None = None, start: Path | None = None
) -> Experiment:
    """Check, expand, compose and assemble. Raises one `UserError` with every problem.

    Relative paths are anchored to `start` (the folder the command was started in).
    """
    start = start or Path.cwd()
    config_dirs = [] if config_dir is None else [Path(config_dir)]
    catalogue = check(overrides, config_dirs).catalogue
    expanded, notes = expand(overrides, config_dirs)
    choices = resolve(catalogue, [parse(text) for text in expanded]).choices
    config = compose(expanded, config_dir)
    config.pop("where", None)  # an experiment's, and expanded
    return assemble(config, choices, start, config_dir, notes, expanded)


def assemble(
    config: dict[str, Any],
    choices: Mapping[str, Any],
    start: Path,
    config_dir: Path | str | None = None,
    notes: Sequence[str] = (),
    overrides: Sequence[str] = (),
) -> Experiment:
    """The experiment of a resolved configuration. Raises one `UserError` with the problems of all components.

    A configuration that has `model.weights_digest` is that of a finished run: its given networks lie in the cache,
    and their files are not read again.
    """
    config = config | {"model": dict(config["model"])}
    if isinstance(config.get("data"), dict) and isinstance(config["data"].get("path"), str):
        path = str(anchor(config["data"]["path"], start))
        config["data"] = config["data"] | {"path": path}
        overrides = [f"data.path={to_text(path)}" if parse(o).key == "data.path" else o for o in overrides]
    weights, digests = config["model"].pop("weights", None), config["model"].pop("weights_digest", None)
    problems: list[str] = []
    settings, found = read_settings(config, start)
    problems += found
    allow = [str(name) for name in config.get("allow") or []]
    if allow and config_dir is not None:
        reach(Path(config_dir))
    parts: dict[str, Any] = {}
    for group in COMPONENTS:
        nodes = config.get("metric") or {} if group == "metric" else {group: config.get(group)}
        for name, node in nodes.items():
            place = f"metric.{name}" if group == "metric" else group
            try:
                what = place if group == "metric" else f"{group}={choices.get(group)}"
                parts[place] = build(node, allow, place, what)
            except UserError as error:
                problems += error.problems
    try:
        parts["noise"] = _noise(config)
    except UserError as error:
        problems += error.problems
    problems += _misfits(parts, choices, settings)
    problems += parts["logger"].problems() if "logger" in parts else []
    given: tuple[PretrainedWeights, ...] = ()
    if digests is not None:
        config["model"] |= {"weights": weights, "weights_digest": digests}
    elif weights is not None:
        problems += _retrained(parts.get("hyper"), str(choices.get("hyper")))
        try:
            given, paths = _given(weights, start, parts, choices, ready=not problems)
            # The content counts, not the place: the digest enters every key, the paths none.
            config["model"] |= {"weights": paths, "weights_digest": [g.digest for g in given]}
            others = [o for o in overrides if parse(o).key != "model.weights"]
            overrides = [*others, f"model.weights={to_text(paths)}"]
        except UserError as error:
            problems += error.problems
    if problems or settings is None:
        raise UserError(*dict.fromkeys(problems))
    metrics = {p.removeprefix("metric."): part for p, part in parts.items() if p.startswith("metric.")}
    built = {group: parts[group] for group in COMPONENTS if group != "metric"}
    return Experiment(
        **built,
        metrics=metrics,
        noise=parts["noise"],
        given=given,
        settings=settings,
        config=config,
        choices={g: c for g, c in choices.items() if c is not None},
        notes=tuple(notes),
        overrides=tuple(overrides),
        config_dir=None if config_dir is None else Path(config_dir).resolve(),
    )


def _given(
    weights: Any, start: Path, parts: Mapping[str, Any], choices: Mapping[str, Any], ready: bool
) -> tuple[tuple[PretrainedWeights, ...], list[str]]:
    """The networks of model.weights and their absolute paths, checked against the model if that is sound (`ready`)."""
    from bnn_runner.rng import global_stream
    from bnn_runner.training.pretrained import count_problems, read_all

    listed = list(weights) if isinstance(weights, (list, tuple)) else [weights]
    if not listed or not all(isinstance(w, str) for w in listed):
        raise UserError(f"model.weights={show(weights)} is no file. Give a path, or a list of paths, one a member.")
    paths = [anchor(w, start) for w in listed]
    method = parts.get("method")
    members = [spec.member for spec in method.needs()] if method is not None else []
    problems = count_problems(len(paths), members, str(choices.get("method"))) if members else []

    def build_network() -> Any:
        with global_stream(0, "skeleton"):
            return parts["model"].build(parts["noise"].network_spec(parts["data"].spec()))

    try:
        what = f"model={choices.get('model')} on data={choices.get('data')}"
        given = read_all(paths, build_network if ready else None, what)
    except UserError as error:
        problems += error.problems
    raise_all(problems)
    return given, [str(p) for p in paths]


def _retrained(hyper: Any, choice: str) -> list[str]:
    """Why given networks cannot go by the rule (empty when they can)."""
    from bnn_runner.hyper.training_rule import TrainingRule

    if not isinstance(hyper, TrainingRule):
        return []
    return [
        f"hyper={choice} changes the training, and model.weights gives a network that is trained already. "
        "Use hyper=evidence or hyper=fixed, or drop model.weights."
    ]


def _noise(config: Mapping[str, Any]) -> Any:
    from bnn_runner.models.likelihoods import NoiseRule

    arguments, problems = check_fields(NoiseRule, config.get("likelihood") or {}, "likelihood.", "likelihood")
    if not problems:
        rule, problems = attempt(NoiseRule, arguments)
    raise_all(problems)
    return rule


def _misfits(parts: Mapping[str, Any], choices: Mapping[str, Any], settings: Settings | None) -> list[str]:
    """Components that are right by themselves and do not go together."""
    names = ("data", "model", "method", "hyper", "augment", "noise")
    data, model, method, hyper, augment, noise = (parts.get(name) for name in names)
    if data is None:
        return []
    from bnn_runner.base import model_problems
    from bnn_runner.hyper.training_rule import TrainingRule, misfits

    problems: list[str] = []
    try:
        spec: TaskSpec = data.spec()
    except UserError as error:
        return list(error.problems)
    if model is not None:
        problems += model_problems(model, spec if noise is None else noise.network_spec(spec))
    if augment is not None:
        problems += augment.problems(spec)
    if method is not None:
        problems += method.problems(spec, hyper)
        if noise is not None:
            problems += noise.problems(spec, method.predictive)
        if method.uses_hyper and noise is not None and getattr(hyper, "noise", "trained") == "evidence":
            problems += noise.problems_by_evidence()
        if isinstance(hyper, TrainingRule):
            problems += misfits(hyper, str(choices.get("hyper")), method, str(choices.get("method")))
        if method.uses_hyper and getattr(hyper, "needs_validation", False) and spec.val_fraction == 0:
            problems.append(
                f"hyper={choices.get('hyper')} chooses on validation data, and data.val_fraction=0 leaves none."
                " Set data.val_fraction=0.1, or take another hyper rule."
            )
    if settings is not None and settings.eval.calibrate == "temperature":
        from bnn_runner.evaluation.temperature import calibration_problems

        problems += calibration_problems(spec)
    return problems


def reach(config_dir: Path) -> None:
    """Let trusted classes be imported from the user's folder or from beside it (after everything installed)."""
    for folder in (config_dir.resolve(), config_dir.resolve().parent):
        if os.fspath(folder) not in sys.path:
            sys.path.append(os.fspath(folder))
