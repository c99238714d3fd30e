"""Any `nn.Module` of the user's own as a model: a class or a function that makes one, and its arguments."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import nn

from bnn_runner.errors import UserError, did_you_mean, raise_all
from bnn_runner.rng import global_stream
from bnn_runner.runtime.torch_state import evaluation_mode
from bnn_runner.tasks import TaskSpec


@dataclass(frozen=True)
class OwnModule:
    """`factory(**arguments)` is the network: inputs [B, ...] as the task has them to outputs [B, K]."""

    factory: Callable[..., Any]
    arguments: Mapping[str, Any]
    name: str
    takes_tokens: ClassVar[bool] = True  # whether it really does shows when it is called

    def __str__(self) -> str:
        return f"model=module ({self.name})"

    def problems(self, spec: TaskSpec) -> list[str]:
        """Why it cannot serve the task, found by making it and showing it two points of zeros."""
        try:
            with global_stream(0, "skeleton"):
                self.build(spec)
        except UserError as error:
            return list(error.problems)
        return []

    def build(self, spec: TaskSpec) -> nn.Module:
        """A new network. Raises `UserError` where it cannot be made, or its outputs are not [B, K]."""
        try:
            network = self.factory(**self.arguments)
        except Exception as error:
            raise UserError(
                f"{self} cannot be made of ({_shown(self.arguments)}): {type(error).__name__}: {error}. "
                "Give its arguments as model.NAME=VALUE."
            ) from error
        if not isinstance(network, nn.Module):
            raise UserError(f"{self} makes a {type(network).__name__}. It must make a torch.nn.Module.")
        if frozen := [n for n, p in network.named_parameters() if not p.requires_grad]:
            more = f" and {len(frozen) - 4} more" if len(frozen) > 4 else ""
            raise UserError(
                f"{self} has parameters that are frozen (requires_grad=False): {', '.join(frozen[:4])}{more}. "
                "Every parameter is trained here and has a posterior. Let it keep them "
                "as buffers (register_buffer), which stay as they are, or unfreeze them."
            )
        network = network.float()  # as the run has it: one that was made in double precision is used in single
        dtype = torch.int64 if spec.vocabulary else torch.float32
        try:
            with torch.no_grad(), evaluation_mode(network):
                outputs = network(torch.zeros(2, *spec.input_shape, dtype=dtype))
        except Exception as error:
            raise UserError(
                f"{self} cannot take the inputs of data={spec.name}, {list(spec.input_shape)} each: "
                f"{type(error).__name__}: {error}. Change its arguments by model.NAME=VALUE, or take another data set."
            ) from error
        one_logit = " (a single logit z of the second class is the two logits 0 and z)."
        shape = list(outputs.shape) if isinstance(outputs, torch.Tensor) else type(outputs).__name__
        if shape != [2, spec.num_outputs]:
            raise UserError(
                f"{self} gives {shape} for two points of data={spec.name}. It must give {[2, spec.num_outputs]}: "
                f"one row a point, {spec.num_outputs} {'logits' if spec.kind == 'classification' else 'targets'} each"
                f"{one_logit if spec.kind == 'classification' and spec.num_outputs == 2 else '.'}"
            )
        return network


def own_module(factory: Callable[..., Any], arguments: Mapping[str, Any], name: str) -> OwnModule:
    """The model of a class or function. Raises `UserError` for arguments that its signature does not have."""
    parameters = inspect.signature(factory).parameters
    unnamed = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD, inspect.Parameter.POSITIONAL_ONLY)
    named = [n for n, p in parameters.items() if p.kind not in unnamed]
    problems = []
    if not any(p.kind is p.VAR_KEYWORD for p in parameters.values()):
        problems += [
            f"model.{key} is no argument of {name}.{did_you_mean(key, named)} It has {', '.join(named) or 'none'}."
            for key in arguments
            if key not in named
        ]
    problems += [
        f"model.{n} is missing, and {name} needs it. Give model.{n}=..."
        for n, p in parameters.items()
        if n in named and p.default is p.empty and n not in arguments
    ]
    raise_all(problems)
    return OwnModule(factory, dict(arguments), name)


def _shown(arguments: Mapping[str, Any]) -> str:
    return ", ".join(f"{k}={v!r}" for k, v in arguments.items())
