"""Weights whose scale has no influence on the network, because something in it divides the scale out.

The network is taken as a function: no class of norm layer is looked for. So norms of any kind are found: batch, layer,
group, instance and RMS norms, filter response normalisation, standardised weights, a person's own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.func import functional_call

from bnn_runner.base import Network

SCALE = 3.0
TOLERANCE = 1e-6
TINY_EPS = 1e-18
"""Stands in for every eps: far above the rounding of constant features (squared), far below real variances."""
LOOSE, LARGE = 1e-3, 1e6
"""An eps written into the code moves outputs by less than `LOOSE`, and not at all where weights are `LARGE` times w."""
FLAT = 1e-4
"""Largest cosine of a gradient and a group's weights at which the group may be invariant."""
POINTS, IMAGES = 8, 4
"""Points that are looked at. Two are too few: batch statistics make ±1 of them, whatever the weights."""
_BATCH_NORM = nn.modules.batchnorm._BatchNorm
_Outputs = Callable[[Mapping[str, Tensor]], Tensor]


@dataclass(frozen=True)
class ScaleInvariance:
    """The tensors in groups whose scale does not matter, in the order of the network, and notes for a reader."""

    names: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()


def scale_invariant(network: Network, x: Tensor, names: Sequence[str]) -> ScaleInvariance:
    """The tensors of `names` in groups that can be rescaled without changing the outputs, f(x, 3w) = f(x, w).

    A group is all tensors of one module (a weight with its bias), or, where these do not qualify, one tensor alone (a
    standardised weight, whose bias does matter). The invariance is that of training: batch norms use batch statistics,
    other modules with running statistics those of their inputs, and every attribute called eps is negligible. In
    evaluation mode with frozen statistics, a batchnorm network does depend on the scale. A tensor of zeros is replaced
    by random numbers, since zero can be scaled anyway.

    In float64, in two steps. By Euler's theorem an invariant group has J w = 0 and J ≠ 0: one backward pass of a random
    combination of the outputs finds the groups for which that holds. They are then scaled, all at once or one by one;
    outputs must agree to 1e-6 relative, or nearly so and to 1e-6 where the weights are 10⁶ times larger (an eps without
    a name). So most networks cost a few passes over a few points.

    Nothing is raised: a network that does not run in this way has no invariant weights, with a note.

    Args:
        network: at its weights; it is left as it was.
        x: inputs [B, ...]; the first 8 are used, or the first 4 images.
        names: the tensors that are asked for.
    """
    some = x[: IMAGES if x.dim() > 2 else POINTS]
    try:
        return ScaleInvariance(_found(network, some, names))
    except Exception as error:  # whatever a network of any kind raises must not end the run
        reason = (str(error).splitlines() or [""])[0]
        return ScaleInvariance(
            notes=(
                "scale-invariant weights were not looked for, because the network does not run in float64 with batch "
                f"statistics on {len(some)} points ({type(error).__name__}: {reason}); none are assumed",
            )
        )


def _found(network: Network, x: Tensor, names: Sequence[str]) -> tuple[str, ...]:
    tensors = {n: _double(t.detach()) for n, t in network.tensors.items()}
    inputs, random = _double(x), torch.Generator().manual_seed(0)
    for name in network.parameters:
        if not tensors[name].any():
            tensors[name] = 0.1 * torch.randn(tensors[name].shape, generator=random, dtype=torch.float64).to(
                inputs.device
            )

    def outputs(changed: Mapping[str, Tensor]) -> Tensor:
        fresh = {n: tensors[n].clone() for n in network.buffers}  # running statistics may be updated
        made: Tensor = functional_call(network.module, {**tensors, **fresh, **changed}, (inputs,))
        return made

    groups = [group for group in _groups(network) if set(group) & set(names)]
    with _as_in_training(network.module) as differentiable:
        cosine = _cosines(outputs, {n: tensors[n] for n in network.parameters}, random) if differentiable else None
        with torch.no_grad():
            parts = [[p for p in _parts(group) if cosine is None or cosine(p) <= FLAT] for group in groups]
            found = set(_confirmed(outputs, tensors, parts, known_to_matter=cosine is not None))
    return tuple(n for n in network.parameters if n in found and n in names)


def _parts(group: Sequence[str]) -> list[Sequence[str]]:
    """A group, and each of its tensors alone."""
    return [group, *([n] for n in group if len(group) > 1)]


def _confirmed(
    outputs: _Outputs, tensors: Mapping[str, Tensor], parts: Sequence[Sequence[Sequence[str]]], known_to_matter: bool
) -> list[str]:
    """The tensors of the first part of each group that can be scaled without moving the outputs.

    The first parts of all groups are scaled at once, each by another factor: where that moves nothing, nothing moves
    with one of them alone. Otherwise each part is scaled alone.
    """
    if not any(parts):
        return []
    before = outputs({})
    if known_to_matter:
        first = [some[0] for some in parts if some]
        factors = torch.linspace(SCALE, SCALE**2, len(first)).tolist()
        scaled = {n: c * tensors[n] for part, c in zip(first, factors, strict=True) for n in part}
        if _change(before, outputs(scaled)) <= TOLERANCE:
            return [n for part in first for n in part]
    found: list[str] = []
    for some in parts:
        for part in some:
            here = {n: tensors[n] for n in part}
            if _unmoved(outputs, before, here) and (known_to_matter or _matters(outputs, before, here)):
                found += part
                break
    return found


def _double(t: Tensor) -> Tensor:
    return t.double() if t.is_floating_point() else t


def _groups(network: Network) -> list[list[str]]:
    """The parameters of each module that are its own."""
    owners: dict[str, list[str]] = {}
    for name in network.parameters:
        owners.setdefault(name.rpartition(".")[0], []).append(name)
    return list(owners.values())


def _cosines(
    outputs: _Outputs, parameters: Mapping[str, Tensor], random: torch.Generator
) -> Callable[[Sequence[str]], float]:
    """|uᵀJ w| / (|uᵀJ| |w|) of a group w, for a random combination u of the outputs; 1 without any influence."""
    leaves = {n: p.clone().requires_grad_() for n, p in parameters.items()}
    with torch.enable_grad():
        made = outputs(leaves)
        mix = torch.randn(made.shape, generator=random, dtype=made.dtype).to(made)
        grads = torch.autograd.grad((mix * made).sum(), list(leaves.values()), allow_unused=True)
    slopes = dict(zip(parameters, grads, strict=True))
    total = sum(float(g.norm()) * float(parameters[n].norm()) for n, g in slopes.items() if g is not None)

    def cosine(group: Sequence[str]) -> float:
        pairs = [(g, parameters[n]) for n in group if (g := slopes[n]) is not None]
        size = sum(float(g.norm()) * float(w.norm()) for g, w in pairs)
        return abs(sum(float((g * w).sum()) for g, w in pairs)) / size if size > 1e-12 * total else 1.0

    return cosine


def _unmoved(outputs: _Outputs, before: Tensor, weights: Mapping[str, Tensor]) -> bool:
    """Whether outputs at 3w are those at w, up to an eps in the code."""
    change = _change(before, outputs({n: SCALE * w for n, w in weights.items()}))
    if not TOLERANCE < change <= LOOSE:
        return change <= TOLERANCE
    large = outputs({n: LARGE * w for n, w in weights.items()})
    return _change(large, outputs({n: SCALE * LARGE * w for n, w in weights.items()})) <= TOLERANCE


def _matters(outputs: _Outputs, before: Tensor, weights: Mapping[str, Tensor]) -> bool:
    """Whether weights in another direction change the outputs."""
    return _change(before, outputs({n: w + w.flip(0) + w.abs().mean() for n, w in weights.items()})) > TOLERANCE


def _change(one: Tensor, two: Tensor) -> float:
    return float((two - one).norm()) / max(float(one.norm()), 1e-300)


@contextmanager
def _as_in_training(module: nn.Module) -> Iterator[bool]:
    """Statistics of the batch, and no eps; the module is restored. Whether derivatives see the statistics.

    They do not where a module that is no batch norm of torch normalises by `running_mean` and `running_var`: these are
    set to the mean and variance of its inputs, but the function that uses them may take them for constants.
    """
    modules = list(module.modules())
    training = [m.training for m in modules]
    eps = [(m, n, v) for m in modules for n, v in vars(m).items() if "eps" in n and isinstance(v, float) and 0 < v < 1]
    frozen = [m for m in modules if not isinstance(m, _BATCH_NORM) and _running(m)]
    hooks = [m.register_forward_pre_hook(_set_statistics) for m in frozen]
    try:
        for m, name, _ in eps:
            setattr(m, name, TINY_EPS)
        for m in modules:
            # Not dropout; a norm has its running statistics among its own buffers.
            m.training = isinstance(m, _BATCH_NORM) or any(b.is_floating_point() for b in m.buffers(recurse=False))
        yield not frozen
    finally:
        for hook in hooks:
            hook.remove()
        for m, name, value in eps:
            setattr(m, name, value)
        for m, mode in zip(modules, training, strict=True):
            m.training = mode


def _running(module: nn.Module) -> bool:
    own = dict(module.named_buffers(recurse=False))
    return "running_mean" in own and "running_var" in own


def _set_statistics(module: nn.Module, inputs: tuple[Tensor, ...]) -> None:
    """Running statistics [C] become those of the inputs [B, C, ...]."""
    x = inputs[0]
    variance, mean = torch.var_mean(x, [d for d in range(x.dim()) if d != 1], correction=0)
    with torch.no_grad():
        for name, value in (("running_mean", mean), ("running_var", variance)):
            kept = module.get_buffer(name)
            kept.copy_(value.view_as(kept))
