"""Networks trained elsewhere: weights read from a file, matched to the model by name and shape, and scored on the task.

Reading a file runs no code: safetensors, or torch files of plain tensors (weights_only). Only the content counts: the
same tensors in another file, or under another prefix, are the same network.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor, nn

from bnn_runner.base import Network
from bnn_runner.errors import UserError
from bnn_runner.tasks import Split, Task
from bnn_runner.training.cache import content_digest
from bnn_runner.training.checkpoint_file import read_checkpoint
from bnn_runner.training.state import TrainingConfig, residual_log_noise
from bnn_runner.training.state_dicts import Found, canonical, find_state

SCORED_POINTS = 2000
"""Points of each part on which a pretrained network is scored, evenly spaced: enough to see whether it fits."""
_SHOWN = 6


@dataclass(frozen=True)
class PretrainedWeights:
    """The state dict of a file.

    Attributes:
        path: The file.
        tensors: Name without common prefixes -> tensor on the CPU.
        digest: Hash of the tensors.
        notes: Lines for the user about how the file was read.
    """

    path: Path
    tensors: Mapping[str, Tensor]
    digest: str
    notes: tuple[str, ...] = ()


def read_weights(path: Path, state: Mapping[str, Tensor] | None = None, entry: str | None = None) -> PretrainedWeights:
    """Reads the state dict in a file.

    Args:
        path: The file.
        state: Name -> tensor of the network, by which its tensors are found in the file; None if it is not known.
        entry: The entry of the file to take, as `state_dict_ema`; None chooses.

    Raises:
        UserError: If the file is missing, damaged, contains objects other than tensors, or has non-finite values.
    """
    found = find_state(read_checkpoint(path), state or {}, f"model.weights={path}", entry)
    tensors = found.tensors
    quantised = [n for n, t in tensors.items() if t.is_quantized or t.is_complex() or t.layout != torch.strided]
    if quantised:
        raise UserError(
            f"model.weights={path} must have real numbers in dense tensors; {_listed(quantised)} is quantised, complex "
            "or sparse. Give the weights before the conversion."
        )
    not_finite = [n for n, t in tensors.items() if t.is_floating_point() and not bool(torch.isfinite(t).all())]
    if not_finite:
        raise UserError(
            f"model.weights={path} must have finite values; {_listed(not_finite)} has infinite or NaN ones. Give the "
            "weights of a training that did not diverge."
        )
    return PretrainedWeights(path, tensors, content_digest(tensors), tuple(_notes(path.name, found)))


def _notes(name: str, found: Found) -> list[str]:
    """Lines for the user about how a file was read."""
    notes = [f"the weights are the entry {found.entry!r} of {name}"] if found.entry else []
    if found.ignored:
        notes.append(f"in {name}, ignored: {_listed(found.ignored)}; no prediction of this network reads them")
    for other in found.others:
        notes.append(f"{name} also has this network as {other!r}; to take it: model.weights_entry={other}")
    floats = {str(t.dtype).removeprefix("torch.") for t in found.tensors.values() if t.is_floating_point()}
    if dtypes := floats - {"float32"}:
        notes.append(f"{name} contains {' and '.join(sorted(dtypes))} numbers, which are converted to float32")
    return notes


def match_weights(module: nn.Module, weights: PretrainedWeights, what: str) -> dict[str, Tensor]:
    """Matches the tensors of a file to the entries of a module's state dict, by name and shape.

    Batch counters of norm layers, which affect no result, and empty buffers may be missing in the file.

    Args:
        module: The network.
        weights: Content of the file.
        what: Name of the model in messages: 'model=resnet20 on data=cifar10'.

    Returns:
        The file's tensors, under the names of the module.

    Raises:
        UserError: With all names, shapes and types that do not fit.
    """
    state = module.state_dict()
    names = {short: name for name, short in canonical(state).items()}
    optional = {
        short for short, name in names.items() if name.endswith("num_batches_tracked") or not state[name].numel()
    }
    missing = sorted(set(names) - set(weights.tensors) - optional)
    unexpected = sorted(set(weights.tensors) - set(names))
    shapes, dtypes = [], []
    for short in sorted(set(names) & set(weights.tensors)):
        in_file, in_network = weights.tensors[short], state[names[short]]
        if in_file.shape != in_network.shape:
            shapes.append(f"{short} is {list(in_file.shape)} in the file and {list(in_network.shape)} in the network")
        elif in_file.is_floating_point() != in_network.is_floating_point():
            dtypes.append(f"{short} is {in_file.dtype} in the file and {in_network.dtype} in the network")
    differences = [
        *([f"Missing in the file: {_listed(missing)}."] if missing else []),
        *([f"Not in the network: {_listed(unexpected)}."] if unexpected else []),
        *([f"Different shapes: {_listed(shapes, '; ')}."] if shapes else []),
        *([f"Different types: {_listed(dtypes, '; ')}."] if dtypes else []),
    ]
    if differences:
        raise UserError(
            f"model.weights={weights.path} does not fit {what}. {' '.join(differences)} Choose the model=... and its "
            "settings with which the network was trained; model.weights_entry=... takes a part of the file."
        )
    return {names[short]: t for short, t in weights.tensors.items()}


def _listed(names: Sequence[str], separator: str = ", ") -> str:
    """The first few names, and how many more there are."""
    rest = len(names) - _SHOWN
    return separator.join(names[:_SHOWN]) + (f"{separator}and {rest} more" if rest > 0 else "")


def pretrained_network(
    module: nn.Module, weights: PretrainedWeights, config: TrainingConfig, task: Task, key: str
) -> Network:
    """Returns a trained network with pretrained weights, on the module's device and in the dtype of the training.

    The noise of regression is that of likelihood.noise=fixed if set, else the residual noise, because learning it
    would be training.

    Args:
        module: The network's module; it is not changed.
        weights: The pretrained weights.
        config: Noise rule, prior and dtype.
        task: The data.
        key: Cache key of the network.

    Raises:
        UserError: If the weights do not fit the module.
    """
    matched = match_weights(module, weights, f"data={task.spec.name}")
    device = next(module.parameters()).device

    def copied(t: Tensor) -> Tensor:
        return t.to(device, config.dtype if t.is_floating_point() else None).clone()

    parameters = {n: copied(matched[n]) for n, _ in module.named_parameters()}
    # Buffers that are not part of a state dict (fixed tables) keep the module's values.
    buffers = {n: copied(matched.get(n, b)) for n, b in module.named_buffers()}
    log_noise = None
    if task.spec.kind == "regression" and config.noise.form == "homoscedastic":
        if config.noise.noise == "fixed":
            log_noise = config.noise.fixed_log_noise(task.target_scale).to(device, config.dtype)
        else:
            log_noise = residual_log_noise(module, parameters | buffers, task)
    likelihood = config.noise.likelihood(task.spec.kind, log_noise)
    return Network(module, parameters, buffers, likelihood, config.precisions(module), key)


@dataclass(frozen=True)
class PretrainedScores:
    """How well a pretrained network fits the task.

    Attributes:
        parts: {part: {n, accuracy or rmse and r2, loglik}}.
        warnings: Messages for the user.
    """

    parts: dict[str, dict[str, float]]
    warnings: tuple[str, ...] = field(default=())

    def lines(self) -> list[str]:
        """Returns one line per part for the user."""
        lines = []
        for name, scores in self.parts.items():
            score = f"accuracy {scores['accuracy']:.3f}" if "accuracy" in scores else f"rmse {scores['rmse']:.4g}"
            lines.append(
                f"  {name:<5} {score}, log-likelihood {scores['loglik']:.4g} nats per point ({scores['n']:,} points)"
            )
        return lines


@torch.no_grad()
def score_pretrained(network: Network, task: Task) -> PretrainedScores:
    """Scores a pretrained network on train, val and test.

    The scores are accuracy (or root mean squared error in original units) and log-likelihood. A network that is no
    better than a constant prediction gets a warning: probably its inputs were prepared differently in training, or its
    classes have another order.
    """
    parts = {n: _score(network, task, s) for n, s in task.splits().items() if n in ("train", "val", "test") and len(s)}
    worst = [name for name, scores in parts.items() if scores["no_better"]]
    warnings: tuple[str, ...] = ()
    if "train" in worst or "test" in worst:
        cause = (
            "inputs and targets are standardised here on the training part"
            if task.spec.kind == "regression"
            else "inputs are scaled and classes are ordered here as in this data set"
        )
        warnings = (
            (
                f"the pretrained network is no better than a constant prediction (on {' and '.join(worst)}): "
                f"{cause}, and it was probably trained on differently prepared data. The posterior will be no "
                "better"
            ),
        )
    plain = {n: {k: v for k, v in scores.items() if k != "no_better"} for n, scores in parts.items()}
    return PretrainedScores(plain, warnings)


def _score(network: Network, task: Task, split: Split) -> dict[str, float]:
    """Scores of one part; `no_better` is 1 if a constant prediction is as good (within two standard errors)."""
    count = min(len(split), SCORED_POINTS)
    subset = split.subset(torch.linspace(0, len(split) - 1, count).round().long())
    outputs = torch.cat([network(x) for x, _ in subset.batches(64)])
    assert subset.targets is not None
    y = subset.targets
    loglik = float(network.likelihood.log_prob(outputs, y).mean())
    if task.spec.kind == "classification":
        accuracy = float((outputs.argmax(-1) == y).double().mean())
        share = float(torch.bincount(y).max()) / count
        bound = share + 2 * math.sqrt(share * (1 - share) / count)
        return {"n": count, "accuracy": accuracy, "loglik": loglik, "no_better": float(accuracy <= min(bound, 0.999))}
    squared = (y - outputs).square().mean(0)
    loglik -= float(task.target_scale.log().sum())
    rmse = float((squared * task.target_scale.square()).mean().sqrt())
    r2 = 1 - float(squared.sum() / (y - y.mean(0)).square().mean(0).sum().clamp_min(1e-12))
    return {"n": count, "rmse": rmse, "r2": r2, "loglik": loglik, "no_better": float(r2 <= 0.05)}


def count_problems(count: int, members: Sequence[int], method: str) -> list[str]:
    """Returns a message if the number of pretrained networks does not suit the method.

    Args:
        count: Number of pretrained networks.
        members: The member numbers of the networks that the method requires.
        method: The choice of the method, for the message.
    """
    required = len(set(members))
    if required == count:
        return []
    network = "network" if required == 1 else "networks"
    return [
        f"method={method} requires {required} trained {network}; model.weights gives {count}. "
        + (
            "Give one file for each, model.weights=[a.pt,b.pt,...], or choose a method with one network."
            if required > 1
            else "Give one file, model.weights=a.pt (with -m and commas, each is a separate run)."
        )
    ]


def read_all(
    paths: Sequence[Path], build: Callable[[], nn.Module] | None, what: str, entry: str | None = None
) -> tuple[PretrainedWeights, ...]:
    """Reads several files and checks them against a module.

    Args:
        paths: The files.
        build: Builds the module; None to skip the check.
        what: Name of the model in messages: 'model=resnet20 on data=cifar10'.
        entry: The entry of each file to take; None chooses.

    Raises:
        UserError: With the problems of all files.
    """
    problems: list[str] = []
    read: list[PretrainedWeights] = []
    module = build() if build is not None else None
    names = {} if module is None else module.state_dict()
    state = {short: names[name] for name, short in canonical(names).items()}
    for path in paths:
        try:
            read.append(read_weights(path, state, entry))
            if module is not None:
                match_weights(module, read[-1], what)
        except UserError as error:
            problems += error.problems
    if problems:
        raise UserError(*problems)
    return tuple(read)
