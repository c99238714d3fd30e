"""Networks trained elsewhere: weights out of a file, put into the model by name and shape, and tried on the task.

Files are read without running code: safetensors, or torch files of plain tensors (weights_only). What
counts is the content: the same tensors in another file, under another prefix, are the same network.
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
"""Where common checkpoints keep the state dict beside optimiser states and counters, in this order."""
PREFIXES = ("module.", "model.", "_orig_mod.", "net.", "network.")
"""What wrappers (DataParallel, Lightning, torch.compile) put before every name."""
TRIED_POINTS = 2000
"""Points of each part that a given network is tried on, evenly spread: enough to see whether it fits."""
_SHOWN = 6
_HOW_TO_SAVE = "Save only the state dict, torch.save(network.state_dict(), 'weights.pt'), and give that file."


@dataclass(frozen=True)
class PretrainedWeights:
    """The state dict of a file, names without common prefixes. `digest` is of the content alone."""

    path: Path
    tensors: Mapping[str, Tensor]
    digest: str
    notes: tuple[str, ...] = ()


def read_weights(path: Path) -> PretrainedWeights:
    """The state dict in `path` on the CPU. Raises `UserError` for a file that is absent, damaged or holds code."""
    if not path.is_file():
        raise UserError(f"model.weights={path} does not exist. It must be a file: .safetensors or torch.save.")
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
        found = ", ".join(map(str, list(content)[:_SHOWN])) or "nothing"
        raise UserError(f"model.weights={path} must contain a state dict; it contains {found}. {_HOW_TO_SAVE}")
    bad = [n for n, t in tensors.items() if t.is_floating_point() and not bool(torch.isfinite(t).all())]
    if bad:
        raise UserError(
            f"model.weights={path} must have finite values; {_listed(bad)} has infinite or NaN ones. Give the "
            "weights of a training that did not diverge."
        )
    kinds = {str(t.dtype).removeprefix("torch.") for t in tensors.values() if t.is_floating_point()} - {"float32"}
    if kinds:
        notes.append(f"{path.name} contains {' and '.join(sorted(kinds))} numbers, which are converted to float32")
    plain = {short: tensors[name] for name, short in canonical(tensors).items()}
    return PretrainedWeights(path, plain, content_digest(plain), tuple(notes))


def _read_safetensors(path: Path) -> Mapping[str, Any]:
    from safetensors import SafetensorError
    from safetensors.torch import load

    try:
        return load(path.read_bytes())  # copies: a mapped file that is cut short later would end the process
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
    """{name: name without the prefixes that all names share}."""
    full = list(names)
    short = list(full)
    while prefix := next((p for p in PREFIXES if short and all(n.startswith(p) for n in short)), None):
        short = [n.removeprefix(prefix) for n in short]
    return dict(zip(full, short, strict=True))


def put_into(module: nn.Module, given: PretrainedWeights, what: str) -> dict[str, Tensor]:
    """The file's tensors under the module's own names. Raises `UserError` with every name that does not fit.

    `what` names the model in messages ('model=resnet20 on data=cifar10'). Batch counters of norm
    layers, which no number depends on, and empty buffers may be absent.
    """
    wanted = module.state_dict()
    own = {short: name for name, short in canonical(wanted).items()}
    optional = {
        short for short, name in own.items() if name.endswith("num_batches_tracked") or not wanted[name].numel()
    }
    missing = sorted(set(own) - set(given.tensors) - optional)
    unexpected = sorted(set(given.tensors) - set(own))
    shapes, kinds = [], []
    for short in sorted(set(own) & set(given.tensors)):
        theirs, ours = given.tensors[short], wanted[own[short]]
        if theirs.shape != ours.shape:
            shapes.append(f"{short} is {list(theirs.shape)} in the file and {list(ours.shape)} in the network")
        elif theirs.is_floating_point() != ours.is_floating_point():
            kinds.append(f"{short} is {theirs.dtype} in the file and {ours.dtype} in the network")
    told = [
        *([f"missing in the file: {_listed(missing)}"] if missing else []),
        *([f"not in the network: {_listed(unexpected)}"] if unexpected else []),
        *([f"other shapes: {_listed(shapes, '; ')}"] if shapes else []),
        *([f"other kinds of numbers: {_listed(kinds, '; ')}"] if kinds else []),
    ]
    if told:
        raise UserError(
            f"model.weights={given.path} does not fit {what}. {'. '.join(t[0].upper() + t[1:] for t in told)}. "
            "Choose the model=... and its settings as the network was trained."
        )
    return {own[short]: t for short, t in given.tensors.items()}


def _listed(names: Sequence[str], separator: str = ", ") -> str:
    """The first few of them, and how many there are."""
    rest = len(names) - _SHOWN
    return separator.join(names[:_SHOWN]) + (f"{separator}and {rest} more" if rest > 0 else "")


def pretrained_network(
    module: nn.Module, given: PretrainedWeights, config: TrainingConfig, task: Task, key: str
) -> Network:
    """The given weights as a trained network on the module's device, in the training's dtype.

    Regression noise: likelihood.noise=fixed as stated, else the residual one (learning it would be training).
    """
    own = put_into(module, given, f"data={task.spec.name}")
    device = next(module.parameters()).device

    def placed(t: Tensor) -> Tensor:
        return t.to(device, config.dtype if t.is_floating_point() else None).clone()

    parameters = {n: placed(own[n]) for n, _ in module.named_parameters()}
    # A buffer that no state dict holds (a fixed table) is as the module makes it.
    buffers = {n: placed(own.get(n, b)) for n, b in module.named_buffers()}
    log_noise = None
    if task.spec.kind == "regression" and config.noise.form == "homoscedastic":
        if config.noise.noise == "fixed":
            assert config.noise.sigma is not None
            log_noise = torch.log(config.noise.sigma / task.target_scale).to(device, config.dtype)
        else:
            log_noise = residual_log_noise(module, parameters | buffers, task)
    likelihood = config.noise.likelihood(task.spec.kind, log_noise)
    return Network(module, parameters, buffers, likelihood, config.precisions(module), key)


@dataclass(frozen=True)
class Trial:
    """How a given network does on the task: {part: {n, accuracy or rmse and r2, loglik}}, and what to be told."""

    parts: dict[str, dict[str, float]]
    warnings: tuple[str, ...] = field(default=())

    def lines(self) -> list[str]:
        """One line a part, for a person."""
        told = []
        for name, found in self.parts.items():
            score = f"accuracy {found['accuracy']:.3f}" if "accuracy" in found else f"rmse {found['rmse']:.4g}"
            told.append(
                f"  {name:<5} {score}, log-likelihood {found['loglik']:.4g} nats a point ({found['n']:,} points)"
            )
        return told


@torch.no_grad()
def try_on(network: Network, task: Task) -> Trial:
    """Accuracy (or root mean squared error, original units) and log-likelihood on train, val and test.

    A network no better than always the same answer is warned about: then the inputs are
    not prepared as they were in its training, or classes are in another order.
    """
    parts = {n: _tried(network, task, s) for n, s in task.splits().items() if n in ("train", "val", "test") and len(s)}
    worst = [name for name, found in parts.items() if found["no_better"]]
    warnings: tuple[str, ...] = ()
    if "train" in worst or "test" in worst:
        cause = (
            "inputs and targets are standardised on the training part here"
            if task.spec.kind == "regression"
            else "inputs are scaled here as this data set does, and classes are in its own order"
        )
        warnings = (
            (
                f"the pretrained network is no better than a constant prediction (on {' and '.join(worst)}): "
                f"{cause}, and it was probably trained on differently prepared data. The posterior will be no "
                "better"
            ),
        )
    return Trial({n: {k: v for k, v in found.items() if k != "no_better"} for n, found in parts.items()}, warnings)


def _tried(network: Network, task: Task, split: Split) -> dict[str, float]:
    """One part's numbers; `no_better` is 1 where a constant answer does as well (within two standard errors)."""
    count = min(len(split), TRIED_POINTS)
    few = split.subset(torch.linspace(0, len(split) - 1, count).round().long())
    outputs = torch.cat([network(x) for x, _ in few.batches(64)])
    assert few.targets is not None
    y = few.targets
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
    """Why `count` given networks do not serve a method that needs the trained networks `members`."""
    needed = len(set(members))
    if needed == count:
        return []
    network = "network" if needed == 1 else "networks"
    return [
        f"method={method} requires {needed} trained {network}; model.weights gives {count}. "
        + (
            "Give one file for each, model.weights=[a.pt,b.pt,...], or choose a method with one network."
            if needed > 1
            else "Give one file, model.weights=a.pt (with -m and commas, each is a separate run)."
        )
    ]


def read_all(paths: Sequence[Path], build: Callable[[], nn.Module] | None, what: str) -> tuple[PretrainedWeights, ...]:
    """Every file, checked against the module that `build` makes. Raises `UserError` with all problems."""
    problems: list[str] = []
    read: list[PretrainedWeights] = []
    module = build() if build is not None else None
    for path in paths:
        try:
            read.append(read_weights(path))
            if module is not None:
                put_into(module, read[-1], what)
        except UserError as error:
            problems += error.problems
    if problems:
        raise UserError(*problems)
    return tuple(read)
