"""Lanes: L independent networks trained at once, and the rule that decides whether they are stacked.

With `stack=auto`, networks whose layers accept stacked weights are always stacked (batched matrix products; 16 times
faster than a loop for small MLPs on two cores). Other networks are trained one after the other on a CPU, where vmapped
convolutions are slower than a loop. On a GPU, a probe of three steps decides.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Literal

import torch
from torch import Tensor, nn
from torch.func import functional_call, vmap

from bnn_runner.tasks import Split

Strategy = Literal["single", "native", "vmap", "loop"]
Tensors = dict[str, Tensor]
Forward = Callable[[Tensor, Tensors], Tensor]

__all__ = ["Forward", "Strategy", "Tensors", "choose_strategy", "concatenate", "lane_forward"]


def lane_forward(
    module: nn.Module,
    strategy: Strategy,
    parameters: Tensors,
    buffers: Tensors,
    called: Callable[[Tensor], Tensor] | None = None,
) -> Forward:
    """Returns the forward pass of all lanes: (x [L, B, ...], noise) -> outputs [L, B, K].

    `noise` holds further buffers [L, ...] for one call. Buffers are updated in place, so each lane keeps its own batch
    statistics.

    Args:
        module: The module of one network.
        strategy: 'single', 'native' or 'vmap'.
        parameters: Stacked parameters [L, ...]. For 'single' they and the buffers must be views of the module's own
            tensors: swapping them in and out would cost as much as a small network does.
        buffers: Stacked buffers [L, ...].
        called: For 'single', called in place of the module if there is no noise (the compiled module).

    Raises:
        ValueError: For the strategy 'loop', which has no joint forward pass.
    """
    if strategy == "single":
        plain = module if called is None else called

        def single(x: Tensor, noise: Tensors) -> Tensor:
            # Convolutions are faster in the memory format channels_last, which the weights have as well.
            batch = x[0].contiguous(memory_format=torch.channels_last) if x.dim() == 5 else x[0]
            outputs = functional_call(module, {n: b[0] for n, b in noise.items()}, (batch,)) if noise else plain(batch)
            return outputs.unsqueeze(0)

        return single
    if strategy == "native":
        return lambda x, noise: functional_call(module, {**parameters, **buffers, **noise}, (x,))
    if strategy == "vmap":

        def one(parameters: Tensors, buffers: Tensors, x: Tensor) -> Tensor:
            return functional_call(module, (parameters, buffers), (x,))

        stacked = vmap(one, randomness="different")
        return lambda x, noise: stacked(parameters, {**buffers, **noise}, x)
    raise ValueError(f"no joint forward pass for lanes under the strategy {strategy}")


def concatenate(splits: Sequence[Split]) -> tuple[Split, Tensor]:
    """Returns one split with the points of all lanes, and the offset [L, 1] of each lane's first point.

    Lanes that train on the same data share one copy of them.
    """
    first = splits[0]
    if all(s is first for s in splits):
        return first, torch.zeros(len(splits), 1, dtype=torch.int64)
    sizes = [len(s) for s in splits]
    targets = [s.targets for s in splits if s.targets is not None]
    stored = [s.inputs for s in splits]
    in_memory = [t for t in stored if isinstance(t, torch.Tensor)]
    lazy = [t for t in stored if not isinstance(t, torch.Tensor)]
    joined = Split(
        inputs=torch.cat(in_memory) if in_memory else lazy[0].joined(lazy[1:]),
        targets=torch.cat(targets) if targets else None,
        ids=torch.cat([s.ids for s in splits]),
        prepare=first.prepare,
    )
    return joined, torch.tensor([0, *sizes[:-1]]).cumsum(0).unsqueeze(1)


def choose_strategy(
    module: nn.Module,
    num_lanes: int,
    device: torch.device,
    setting: str,
    probe: Callable[[Strategy], float] | None = None,
) -> Strategy:
    """Selects the strategy by the rule of this module.

    Args:
        module: The module of one network.
        num_lanes: Number of lanes L.
        device: Where they are trained.
        setting: `stack`: 'auto', 'always' or 'never'.
        probe: Measures the seconds of a training step: of one lane for 'single', of all for 'vmap'.
    """
    if num_lanes == 1:
        return "single"
    if setting == "never":
        return "loop"
    if getattr(module, "stacks_lanes", False):
        return "native"
    if setting == "always":
        return "vmap"
    if device.type == "cpu" or probe is None:
        return "loop"
    return "vmap" if probe("vmap") < probe("single") * num_lanes else "loop"


def seconds_of(work: Callable[[], object], device: torch.device, repeats: int = 3) -> float:
    """Measures the total time of `repeats` calls after one warm-up call, in seconds; waits for the device to finish."""
    work()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    start = time.perf_counter()
    for _ in range(repeats):
        work()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter() - start
