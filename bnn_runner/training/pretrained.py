"""Networks trained elsewhere: weights read from a file, matched to the model by name and shape, and scored on the task.

Reading a file runs no code: safetensors, or torch files of plain tensors (weights_only). Only the content counts: the
same tensors in another file, or under another prefix, are the same network.
"""

from __future__ import annotations

import math
import pickle
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from bnn_runner.base import Network
from bnn_runner.errors import UserError
from bnn_runner.tasks import Split, Task
from bnn_runner.training.cache import content_digest
from bnn_runner.training.state import TrainingConfig, residual_log_noise

INSIDE = ("state_dict", "model_state_dict", "model", "network", "net")
"""Entries in which common checkpoints store the state dict, next to optimiser states and counters; tried in order."""
PREFIXES = ("module.", "model.", "_orig_mod.", "net.", "network.")
"""Prefixes that wrappers (DataParallel, Lightning, torch.compile) add to every name."""
SCORED_POINTS = 2000
"""Points of each part on which a pretrained network is scored, evenly spaced: enough to see whether it fits."""
_SHOWN = 6
_HOW_TO_SAVE = "Save only the state dict, torch.save(network.state_dict(), 'weights.pt'), and use that file."


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


def read_weights(path: Path) -> PretrainedWeights:
    """Reads the state dict in a file.

    Raises:
        UserError: If the file is missing, damaged, contains objects other than tensors, or has non-finite values.
    """
    if not path.is_file():
        raise UserError(f"model.weights={path} does not exist. Give a .safetensors file, or one written by torch.save.")
    content = _read_safetensors(path) if path.suffix == ".safetensors" else _read_torch(path)
    notes = []
    if not any(isinstance(v, Tensor) for v in content.values()):
        for name in INSIDE:
            inner = content.get(name)
            if isinstance(inner, Mapping) and any(isinstance(v, Tensor) for v in inner.values()):
                content = inner
                notes.append(f"the weights are the entry {name!r} of {path.name}")
                break
    tensors = {str(n): t.detach() for n, t in content.items() if isinstance(t, Tensor)}
    if not tensors:
        entries = ", ".join(map(str, list(content)[:_SHOWN])) or "nothing"
        raise UserError(f"model.weights={path} must contain a state dict; it contains {entries}. {_HOW_TO_SAVE}")
    not_finite = [n for n, t in tensors.items() if t.is_floating_point() and not bool(torch.isfinite(t).all())]
    if not_finite:
        raise UserError(
            f"model.weights={path} must have finite values; {_listed(not_finite)} has infinite or NaN ones. Give the "
            "weights of a training that did not diverge."
        )
    dtypes = {str(t.dtype).removeprefix("torch.") for t in tensors.values() if t.is_floating_point()} - {"float32"}
    if dtypes:
        notes.append(f"{path.name} contains {' and '.join(sorted(dtypes))} numbers, which are converted to float32")
    plain = {short: tensors[name] for name, short in canonical(tensors).items()}
    return PretrainedWeights(path, plain, content_digest(plain), tuple(notes))


def _read_safetensors(path: Path) -> Mapping[str, Any]:
    from safetensors import SafetensorError
    from safetensors.torch import load

    try:
        return load(path.read_bytes())  # memory-mapped tensors crash the process if the file is truncated later
    except (SafetensorError, OSError) as error:
        raise UserError(f"Could not read model.weights={path} as safetensors ({error}). {_HOW_TO_SAVE}") from error


def _read_torch(path: Path) -> Mapping[str, Any]:
    try:
        content = torch.load(path, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        raise UserError(
            f"model.weights={path} must contain plain tensors only; it contains other objects (a whole "
            f"pickled network?), and reading these could run code. {_HOW_TO_SAVE}"
        ) from error
    except (OSError, EOFError, RuntimeError, ValueError, KeyError, AttributeError) as error:
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise UserError(f"Could not read model.weights={path} with torch ({reason}). {_HOW_TO_SAVE}") from error
    if not isinstance(content, Mapping):
        raise UserError(
            f"model.weights={path} must contain a state dict; it contains a {type(content).__name__}. {_HOW_TO_SAVE}"
        )
    return content


def canonical(names: Mapping[str, Any] | Sequence[str]) -> dict[str, str]:
    """Returns {name: name without the prefixes in `PREFIXES` that all names share}."""
    full = list(names)
    short = list(full)
    while prefix := next((p for p in PREFIXES if short and all(n.startswith(p) for n in short)), None):
        short = [n.removeprefix(prefix) for n in short]
    return dict(zip(full, short, strict=True))


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
            "settings with which the network was trained."
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


def read_all(paths: Sequence[Path], build: Callable[[], nn.Module] | None, what: str) -> tuple[PretrainedWeights, ...]:
    """Reads several files and checks them against a module.

    Args:
        paths: The files.
        build: Builds the module; None to skip the check.
        what: Name of the model in messages: 'model=resnet20 on data=cifar10'.

    Raises:
        UserError: With the problems of all files.
    """
    problems: list[str] = []
    read: list[PretrainedWeights] = []
    module = build() if build is not None else None
    for path in paths:
        try:
            read.append(read_weights(path))
            if module is not None:
                match_weights(module, read[-1], what)
        except UserError as error:
            problems += error.problems
    if problems:
        raise UserError(*problems)
    return tuple(read)
