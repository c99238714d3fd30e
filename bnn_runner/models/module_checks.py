"""What a user's network must be for its results to be repeatable: a function of its inputs, parameters and buffers.

A run keeps parameters and buffers, and builds the module again around them. Layers in a plain list, random constants,
inputs that are written into or outputs that depend on the rest of a batch would change results without an error.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

import torch
from torch import Tensor, nn
from torch.func import functional_call

from bnn_runner.rng import generator, global_stream
from bnn_runner.runtime.torch_state import evaluation_mode, plain_attention
from bnn_runner.tasks import TaskSpec

_LOOSE = 1e-3


def register_constants(module: nn.Module) -> None:
    """Registers tensors that are plain attributes as buffers, so that they follow the network's device and precision.

    They are not saved with it (`persistent=False`), as before. Tensors computed from parameters stay as they are.
    """
    for part in module.modules():
        for name, value in list(vars(part).items()):
            if isinstance(value, Tensor) and not value.requires_grad and value.is_floating_point():
                delattr(part, name)
                part.register_buffer(name, value, persistent=False)


def unregistered(module: nn.Module) -> list[str]:
    """Names of layers and parameters in plain lists, tuples and mappings, which PyTorch does not register."""
    known = {id(m) for m in module.modules()} | {id(p) for p in module.parameters()}
    found = []
    for place, part in module.named_modules():
        for name, value in vars(part).items():
            if name.startswith("_"):
                continue
            if any(isinstance(v, (nn.Module, nn.Parameter)) and id(v) not in known for v in _inside(value)):
                found.append(f"{place}.{name}" if place else name)
    return found


def _inside(value: object) -> Iterator[object]:
    if isinstance(value, (list, tuple)):
        for v in value:
            yield from _inside(v)
    elif isinstance(value, Mapping):
        yield from _inside(list(value.values()))
    else:
        yield value


def function_problems(build: Callable[[], nn.Module], spec: TaskSpec, name: str) -> list[str]:
    """Reasons why what `build` makes is not one differentiable function of inputs, parameters and buffers.

    Args:
        build: builds the network, with initial weights from the global generator.
        spec: the task, which gives the shape of the inputs.
        name: how a message calls the network.
    """
    with global_stream(0, "skeleton"):
        module = build()
    if names := unregistered(module):
        return [
            f"{name} must register its layers and parameters; PyTorch neither trains nor saves those in a plain list "
            f"or mapping: {', '.join(names)}. Use nn.ModuleList, nn.ModuleDict or nn.ParameterList."
        ]
    x = _inputs(spec)
    with torch.inference_mode(False), torch.enable_grad(), evaluation_mode(module), plain_attention():
        try:
            outputs = module(x.clone())
        except Exception:  # it was called with zeros before: such inputs are not what it takes
            return []
        with torch.no_grad():
            kept = x.clone()
            again = module(kept)
            alone = torch.cat([module(point.clone()) for point in x.split(1)])
        if not torch.equal(kept, x):
            return [
                f"{name} must not change its inputs in place (as in x -= 1), since they are the data. Write x = x - 1."
            ]
        if not _same(outputs, again):
            return [
                f"{name} must give the same outputs for the same inputs in evaluation mode; got others in a second "
                "call. Use nn.Dropout, or F.dropout(..., training=self.training)."
            ]
        if not _same(outputs, alone):
            return [
                f"{name} must treat each point alone in evaluation mode; got other outputs for a point among others "
                "than for the point alone. Use running statistics there, as nn.BatchNorm does."
            ]
        parameters = list(module.parameters())
        if parameters:
            try:
                torch.autograd.grad(outputs.sum(), parameters, allow_unused=True)
            except RuntimeError as error:
                return [f"{name} must be differentiable in its parameters; its backward pass failed: {error}"]
    with global_stream(1, "skeleton"):
        other = build()
    tensors = {n: t.detach() for n, t in (*module.named_parameters(), *module.named_buffers())}
    with torch.no_grad(), evaluation_mode(other), plain_attention():
        if not _same(outputs, functional_call(other, tensors, (x.clone(),))):
            return [
                f"{name} must be a function of its parameters and buffers alone; built a second time, and given those "
                "of the first, it gives other outputs. Register what differs (random constants in lists, say) with "
                "register_buffer."
            ]
    return []


def _inputs(spec: TaskSpec) -> Tensor:
    shape, random = (3, *spec.input_shape), generator(0, "module check")
    if spec.vocabulary:
        return torch.randint(0, spec.vocabulary, shape, generator=random)
    return torch.randn(shape, generator=random)


def _same(a: Tensor, b: Tensor) -> bool:
    size = float(a.detach().abs().max().nan_to_num(0.0)) if a.numel() else 0.0
    return a.shape == b.shape and torch.allclose(a, b, _LOOSE, _LOOSE * size, equal_nan=True)
