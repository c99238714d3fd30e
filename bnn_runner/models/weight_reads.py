"""Where a forward pass reads each parameter: inside its own layer's forward, or elsewhere too.

Noise that is added to a layer's inputs or outputs, and a Jacobian that is made of them, stand for the layer's weight
only if nothing else reads it. A tied weight, `F.linear` on another layer's weight or a layer with a forward of its own
breaks that, and no value need show it: a ReLU may hide the second read at every point that is looked at. So reads are
counted, not compared: a pass runs under a `TorchFunctionMode`, which sees every operation and its arguments.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.overrides import TorchFunctionMode

from bnn_runner.runtime.torch_state import evaluation_mode, plain_attention, training_mode

LAYERS = (nn.Linear, nn.modules.conv._ConvNd, nn.Embedding, nn.modules.batchnorm._BatchNorm, nn.LayerNorm, nn.GroupNorm)
_LOOKS = frozenset(
    {"__get__", "size", "dim", "numel", "stride", "is_contiguous", "is_floating_point", "element_size", "__len__"}
)
"""Methods that look at a tensor's shape or type and not at its numbers."""
_DERIVED = frozenset({"T", "mT", "H", "mH", "data", "real", "imag"})
"""Properties that give the numbers again."""
PROBED_POINTS = 8


@dataclass
class LayerReads:
    """What passes did with one layer.

    Attributes:
        calls: the most calls in one pass.
        plain: whether every call gave what PyTorch's class computes from its input.
        whole: whether every call was given as many rows as there are points.
        shared: its parameters (by full name) that were read outside its calls, or not exactly once in each.
        outside: those that were read outside its calls.
    """

    calls: int = 0
    plain: bool = True
    whole: bool = True
    shared: set[str] = field(default_factory=set)
    outside: set[str] = field(default_factory=set)

    @property
    def alone(self) -> bool:
        """Whether the layer's calls are all that reads its parameters, and do with them what PyTorch's class does."""
        return self.plain and not self.shared


class _Reads(TorchFunctionMode):
    """Counts the operations that take a tensor of `names`, told apart by the layer whose call is running."""

    def __init__(self, names: Mapping[int, str]) -> None:
        super().__init__()
        self.names = names
        self.running: list[nn.Module] = []
        self.found: list[tuple[str, nn.Module | None]] = []

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        name = getattr(func, "__name__", str(func))
        if name not in _LOOKS or (name == "__get__" and getattr(func.__self__, "__name__", "") in _DERIVED):
            for tensor in _tensors((*args, *kwargs.values())):
                if id(tensor) in self.names:
                    self.found.append((self.names[id(tensor)], self.running[-1] if self.running else None))
        return func(*args, **kwargs)


def _tensors(values: Any) -> Iterator[Tensor]:
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, (list, tuple)):
            yield from _tensors(value)


def weight_reads(
    module: nn.Module, tensors: Mapping[str, Tensor], x: Tensor, training: bool = True
) -> dict[str, LayerReads]:
    """How forward passes use each linear, convolution, embedding and norm layer, by name.

    The points are passed as they are, the first alone and, if they are numbers, all of them mirrored and far out:
    branches that depend on the values of a batch are taken by one of these or another.

    Args:
        module: the network; its mode and random state are left as found.
        tensors: its parameters and buffers by name. Buffers are copied, since norm layers write into them in training.
        x: points [B, ...], of which the first 8 are used.
        training: whether a pass in training mode counts as well.
    """
    x = x[:PROBED_POINTS]
    probe = _Probe(module, tensors)
    cuda = [x.device] if x.device.type == "cuda" else []
    with torch.random.fork_rng(cuda), torch.no_grad(), plain_attention():
        with evaluation_mode(module):
            probe.run(x.clone())  # a network may write into its inputs
            probe.run(x[:1].clone())
            for points in (-x, 4 * x) if x.is_floating_point() else ():
                with suppress(Exception):  # a network need not support inputs that its task does not have
                    probe.run(points)
        if training and len(x) > 1:
            with training_mode(module):
                probe.run(x.clone())
    return probe.found


class _Probe:
    """Passes of a module, and what they have shown so far of its layers."""

    def __init__(self, module: nn.Module, tensors: Mapping[str, Tensor]) -> None:
        self.module = module
        self.layers = {n: m for n, m in module.named_modules() if isinstance(m, LAYERS)}
        self.found = {name: LayerReads() for name in self.layers}
        self._place = {id(m): n for n, m in self.layers.items()}
        parameters = {n for n, _ in module.named_parameters()}
        # Copies all: each parameter must be an object of its own, which tells its reads.
        self._tensors = {
            n: t.detach().view_as(t) if n in parameters else t.detach().clone() for n, t in tensors.items()
        }
        self._names = {id(t): n for n, t in self._tensors.items() if n in parameters}
        self._own = _own_parameters(module, self.layers)

    def run(self, x: Tensor) -> None:
        mode = _Reads(self._names)
        calls = dict.fromkeys(self.layers, 0)
        with ExitStack() as stack:
            for name, layer in self.layers.items():
                stack.enter_context(_watched(layer, mode, _checker(layer, self.found[name], calls, name, len(x))))
            stack.enter_context(mode)
            functional_call(self.module, self._tensors, (x,))
        for name, reads in self.found.items():
            reads.calls = max(reads.calls, calls[name])
            for parameter in self._own[name]:
                places = [self._place.get(id(layer)) for read, layer in mode.found if read == parameter]
                if places != [name] * calls[name]:
                    reads.shared.add(parameter)
                if places.count(name) != len(places):
                    reads.outside.add(parameter)


def _own_parameters(module: nn.Module, layers: Mapping[str, nn.Module]) -> dict[str, list[str]]:
    """Full names of each layer's weight and bias, as `named_parameters` has them (a shared one by its first name)."""
    first = {id(p): n for n, p in module.named_parameters()}
    return {
        name: [first[id(p)] for p in layer.parameters(recurse=False) if id(p) in first]
        for name, layer in layers.items()
    }


@contextmanager
def _watched(layer: nn.Module, mode: _Reads, check: Callable[..., None]) -> Iterator[None]:
    """While the block runs, `mode` knows when the layer's forward runs, and `check` sees input and output."""

    def enter(module: nn.Module, *_: object) -> None:
        mode.running.append(module)

    def leave(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        mode.running.pop()
        check(args, kwargs, output)

    handles = [layer.register_forward_pre_hook(enter), layer.register_forward_hook(leave, with_kwargs=True)]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _checker(layer: nn.Module, reads: LayerReads, calls: dict[str, int], name: str, points: int) -> Callable[..., None]:
    stock: Any = next(c for c in type(layer).__mro__ if c.__module__.startswith("torch.nn.modules"))

    def check(args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        calls[name] += 1
        with torch._C.DisableTorchFunction():
            expected = stock.forward(layer, *args, **kwargs)
            same = isinstance(output, Tensor) and expected.shape == output.shape
            reads.plain &= same and torch.allclose(expected, output, 1e-4, 1e-5, equal_nan=True)
        reads.whole &= len((*args, *kwargs.values())[0]) == points

    return check
