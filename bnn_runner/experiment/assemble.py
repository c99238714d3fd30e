"""`Experiment`: the objects of one run, built from its frozen resolved configuration and checked as a whole.

All problems of all components are collected in one `UserError` before any computation starts.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bnn_runner.config.groups import Catalogue
from bnn_runner.config.run_config import RunConfig, thawed
from bnn_runner.config.schema import check_fields, show
from bnn_runner.config.settings import COMPONENTS, Settings, attempt, read_settings
from bnn_runner.errors import UserError, raise_all
from bnn_runner.experiment.components import add_to_import_path, build
from bnn_runner.experiment.compose import resolve_run

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


@dataclass(frozen=True)
class Experiment:
    """The objects that the configuration of one run describes.

    All of them are built from `run`. `changed` returns an experiment for a changed configuration; it rebuilds only the
    objects that the change affects.

    Attributes:
        run: The resolved configuration.
        data: The data set.
        model: Builds networks.
        method: Fits the posterior.
        prior: The prior used in training.
        hyper: The rule for the hyperparameters of the posterior.
        schedule: Optimiser, epochs and learning rate of the training.
        augment: The augmentation of training images.
        logger: Where finished cells are logged.
        metrics: Name -> metric.
        noise: The noise rule of regression.
        settings: The top-level settings.
        pretrained: One network trained elsewhere per member; empty if networks are trained here.
    """

    run: RunConfig
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
    pretrained: tuple[PretrainedWeights, ...] = ()

    @property
    def config(self) -> dict[str, Any]:
        """A copy of the resolved configuration as dictionaries and lists."""
        return self.run.plain()

    @property
    def choices(self) -> dict[str, Any]:
        """Group -> name of its choice; a list of names for metrics."""
        choices: dict[str, Any] = thawed(self.run.choices)
        return choices

    @property
    def training_rule(self) -> TrainingRule | None:
        """The hyperparameter rule if it acts during training and the method trains a network; else None."""
        from bnn_runner.hyper.training_rule import TrainingRule

        trains = any(spec.trained for spec in self.method.needs())
        return self.hyper if trains and isinstance(self.hyper, TrainingRule) else None

    @property
    def uses_hyper(self) -> bool:
        """Whether the hyperparameter rule affects the result: the method uses it, or the training does."""
        return self.method.uses_hyper or self.training_rule is not None

    def changed(self, changes: Mapping[str, Any]) -> Experiment:
        """Returns the experiment with other values of some dotted keys; unaffected objects are shared.

        Raises:
            UserError: If the changed configuration is not valid.
        """
        run = self.run.changed(changes)
        return self if run is self.run else build_experiment(run, self)

    def one_seed(self, seed: int) -> Experiment:
        """Returns the experiment of one cell: one seed, no replicates."""
        return self.changed({"seed": seed, "replicates": 1})

    @property
    def seeds(self) -> range:
        """The seed of each cell: `seed` and the following ones for the replicates."""
        return range(self.settings.seed, self.settings.seed + self.settings.replicates)


def load_experiment(
    overrides: Sequence[str], config_dir: Path | str | None = None, start: Path | None = None
) -> Experiment:
    """Builds the experiment of a command line; see `resolve_run` and `build_experiment`."""
    return build_experiment(resolve_run(overrides, config_dir, start))


def build_experiment(run: RunConfig, like: Experiment | None = None, spec: TaskSpec | None = None) -> Experiment:
    """Builds and checks the objects of a resolved configuration.

    Networks trained elsewhere (`model.weights`) are read, and their digests are added to the configuration. If it has
    digests already, the networks are shared with `like`, or are in the cache of a finished run.

    Args:
        run: The resolved configuration.
        like: An experiment; objects with the same configuration are shared with it.
        spec: What is known of the data, if their files need not exist (a finished run with a saved posterior).

    Raises:
        UserError: With the problems of all components.
    """
    tree = run.plain()
    weights, digests = tree["model"].pop("weights", None), tree["model"].pop("weights_digest", None)
    entry = tree["model"].pop("weights_entry", None)
    settings, problems = read_settings(tree, run.start)
    parts, new_problems = _components(run, tree, like)
    problems += new_problems
    run, new_problems = _by_kind(run, parts, spec)
    problems += new_problems
    problems += _conflicts(parts, run.choices, settings, spec)
    problems += parts["logger"].problems() if "logger" in parts else []
    shared = like is not None and digests is not None and list(like.run.get("model.weights_digest") or ()) == digests
    pretrained = like.pretrained if like is not None and shared else ()
    if entry is not None and weights is None and digests is None:
        problems.append(f"model.weights_entry={entry} requires a file: set model.weights=FILE.")
    if weights is not None and digests is None:
        problems += _training_rule_problems(parts.get("hyper"), str(run.choices.get("hyper")))
        try:
            pretrained = _read_weights(weights, entry, parts, run.choices, ready=not problems)
            # The content counts, not the path: the digest enters every key, the paths enter none.
            run = run.with_facts({"model.weights_digest": [p.digest for p in pretrained]})
        except UserError as error:
            problems += error.problems
    if problems or settings is None:
        raise UserError(*dict.fromkeys(problems))
    metrics = {p.removeprefix("metric."): part for p, part in parts.items() if p.startswith("metric.")}
    components = {group: parts[group] for group in COMPONENTS if group != "metric"}
    return Experiment(
        run=run, **components, metrics=metrics, noise=parts["noise"], settings=settings, pretrained=pretrained
    )


def _components(run: RunConfig, tree: Mapping[str, Any], like: Experiment | None) -> tuple[dict[str, Any], list[str]]:
    """Returns the objects by their places in the configuration ('model', 'metric.rmse'), and all problems."""
    allow = [str(name) for name in tree.get("allow") or []]
    if allow and run.config_dir is not None:
        add_to_import_path(run.config_dir)
    known = {} if like is None else _nodes(like.config) | {"allow": like.config.get("allow")}
    parts: dict[str, Any] = {}
    problems: list[str] = []
    for place, node in _nodes(tree).items():
        name = place.removeprefix("metric.")
        if like is not None and place in known and known[place] == node and known["allow"] == tree.get("allow"):
            parts[place] = getattr(like, place) if name == place else like.metrics[name]
            continue
        try:
            parts[place] = build(node, allow, place, place if name != place else f"{place}={run.choices.get(place)}")
        except UserError as error:
            problems += error.problems
    try:
        parts["noise"] = _noise(tree)
    except UserError as error:
        problems += error.problems
    return parts, problems


def _by_kind(run: RunConfig, parts: dict[str, Any], spec: TaskSpec | None) -> tuple[RunConfig, list[str]]:
    """Replaces hyper=auto by the rule for the kind of the task, in `parts` and in the returned configuration.

    The overrides keep hyper=auto; the cell is that of the rule itself.
    """
    from bnn_runner.hyper.auto import Auto

    auto, data = parts.get("hyper"), parts.get("data")
    if not isinstance(auto, Auto) or data is None:
        return run, []
    try:
        name, note = auto.choice(data.spec() if spec is None else spec)
        catalogue = Catalogue([] if run.config_dir is None else [run.config_dir])
        node = catalogue.load("hyper", name)
        parts["hyper"] = build(node, [str(a) for a in run.plain().get("allow") or []], "hyper", f"hyper={name}")
    except UserError as error:
        return run, list(error.problems)
    uses = getattr(parts.get("method"), "uses_hyper", False)
    notes = (*run.notes, note) if note and uses else run.notes
    tree = run.plain() | {"hyper": node}
    return replace(run, tree=tree, choices={**thawed(run.choices), "hyper": name}, notes=notes), []


def _nodes(tree: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the configuration node of each component by its place, without the keys of pretrained weights."""
    nodes = {group: tree.get(group) for group in COMPONENTS if group != "metric"}
    if isinstance(nodes["model"], Mapping):
        of_files = ("weights", "weights_digest", "weights_entry")
        nodes["model"] = {k: v for k, v in nodes["model"].items() if k not in of_files}
    return nodes | {f"metric.{name}": node for name, node in (tree.get("metric") or {}).items()}


def _read_weights(
    weights: Any, entry: Any, parts: Mapping[str, Any], choices: Mapping[str, Any], ready: bool
) -> tuple[PretrainedWeights, ...]:
    """Reads the networks of model.weights, and checks them against the model if `ready` (it has no problems)."""
    from bnn_runner.rng import global_stream
    from bnn_runner.training.pretrained import count_problems, read_all

    listed = list(weights) if isinstance(weights, (list, tuple)) else [weights]
    if not listed or not all(isinstance(w, str) for w in listed):
        raise UserError(f"model.weights must be a path or a list of paths, one for each member; got {show(weights)}.")
    paths = [Path(w) for w in listed]
    method = parts.get("method")
    members = [spec.member for spec in method.needs()] if method is not None else []
    problems = count_problems(len(paths), members, str(choices.get("method"))) if members else []

    def build_network() -> Any:
        with global_stream(0, "skeleton"):
            return parts["model"].build(parts["noise"].network_spec(parts["data"].spec()))

    try:
        what = f"model={choices.get('model')} on data={choices.get('data')}"
        pretrained = read_all(paths, build_network if ready else None, what, None if entry is None else str(entry))
    except UserError as error:
        problems += error.problems
    raise_all(problems)
    return pretrained


def _training_rule_problems(hyper: Any, choice: str) -> list[str]:
    """A message if the hyperparameter rule acts during training, which pretrained networks do not have."""
    from bnn_runner.hyper.training_rule import TrainingRule

    if not isinstance(hyper, TrainingRule):
        return []
    return [
        (
            f"hyper={choice} acts during training, but model.weights gives a trained network. Use "
            "hyper=evidence or hyper=fixed, or remove model.weights."
        )
    ]


def _noise(config: Mapping[str, Any]) -> Any:
    from bnn_runner.models.likelihoods import NoiseRule

    arguments, problems = check_fields(NoiseRule, config.get("likelihood") or {}, "likelihood.", "likelihood")
    if not problems:
        rule, problems = attempt(NoiseRule, arguments)
    raise_all(problems)
    return rule


def _conflicts(
    parts: Mapping[str, Any], choices: Mapping[str, Any], settings: Settings | None, spec: TaskSpec | None
) -> list[str]:
    """Problems of components that are valid by themselves but do not fit together; `spec` is that of the data."""
    names = ("data", "model", "method", "hyper", "augment", "noise")
    data, model, method, hyper, augment, noise = (parts.get(name) for name in names)
    if data is None:
        return []
    from bnn_runner.base import model_problems
    from bnn_runner.hyper.training_rule import TrainingRule, misfits

    problems: list[str] = []
    try:
        spec = data.spec() if spec is None else spec
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
        if method.uses_hyper and hyper is not None and hasattr(hyper, "problems"):
            problems += hyper.problems(spec)
        if isinstance(hyper, TrainingRule):
            problems += misfits(hyper, str(choices.get("hyper")), method, str(choices.get("method")))
        if method.uses_hyper and getattr(hyper, "needs_validation", False) and spec.val_fraction == 0:
            problems.append(
                f"hyper={choices.get('hyper')} requires validation data; got data.val_fraction=0. Set "
                "data.val_fraction=0.1, or choose another hyper rule."
            )
    if settings is not None and settings.eval.calibrate == "temperature":
        from bnn_runner.evaluation.temperature import calibration_problems

        problems += calibration_problems(spec)
    return problems
