"""Assertions with a sentence, and a snapshot of what a computation must leave as it was."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from bnn_runner.base import Network

State = dict[str, Any]


def require(holds: bool, message: str) -> None:
    """Raises `AssertionError(message)` unless it holds (also under python -O)."""
    if not holds:
        raise AssertionError(message)


def require_equal(result: Tensor, expected: Tensor, message: str, tolerance: float = 1e-9) -> None:
    """Shapes, types and numbers to a relative and absolute `tolerance`; 0 means bit for bit."""
    torch.testing.assert_close(
        result, expected, rtol=tolerance, atol=tolerance, equal_nan=True, msg=lambda details: f"{message}\n{details}"
    )


def require_sentences(problems: Any, where: str) -> None:
    """A list of texts, each a whole sentence."""
    require(isinstance(problems, list), f"{where} must return a list of sentences; got {problems!r}.")
    for problem in problems:
        whole = isinstance(problem, str) and problem[:1].strip() and problem.rstrip().endswith(".") and " " in problem
        require(bool(whole), f"{where} must return whole sentences, each ending in a full stop; got {problem!r}.")


def require_plain(value: Any, where: str) -> None:
    """A value that JSON can keep."""
    try:
        json.dumps(value)
    except TypeError:
        raise AssertionError(f"{where} must be a plain value for JSON; got {value!r}.") from None


def snapshot(networks: Sequence[Network] = ()) -> State:
    """The global state of torch, and the flags, hooks and tensors of networks."""
    seen: State = {
        "the global random state": torch.get_rng_state().tolist(),
        "the default dtype": torch.get_default_dtype(),
        "the grad mode": torch.is_grad_enabled(),
        "the number of threads": torch.get_num_threads(),
        "the TF32 flags": (torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32),
    }
    for i, network in enumerate(networks):
        module = network.module
        seen[f"the training flags of network {i}"] = {n: m.training for n, m in module.named_modules()}
        seen[f"the hooks of network {i}"] = {
            n: (len(m._forward_hooks), len(m._forward_pre_hooks), len(m._backward_hooks))
            for n, m in module.named_modules()
        }
        held = {"module's": {**dict(module.named_parameters()), **dict(module.named_buffers())}}
        for whose, tensors in {**held, "trained": network.tensors}.items():
            for n, t in tensors.items():
                kept = (t.data_ptr(), t.requires_grad, t.grad is None, t.detach().clone())
                seen[f"the {whose} tensor {n} of network {i}"] = kept
    return seen


def require_unchanged(before: State, after: State, where: str) -> None:
    """Raises `AssertionError` naming what `where` (a name as "fit") has changed."""
    require(before.keys() == after.keys(), f"{where} must not add or remove modules or tensors of the networks.")
    for name, value in before.items():
        if isinstance(value, tuple) and isinstance(value[-1], Tensor):
            same = value[:-1] == after[name][:-1] and torch.equal(value[-1], after[name][-1])
        else:
            same = value == after[name]
        require(same, f"{where} must leave {name} as it was, and changed it.")
