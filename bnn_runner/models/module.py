"""Any `nn.Module` of a user as a model: a class or function that builds it, and its arguments."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import nn

from bnn_runner.errors import UserError, did_you_mean, raise_all
from bnn_runner.models.module_checks import function_problems, register_constants
from bnn_runner.runtime.torch_state import evaluation_mode
from bnn_runner.tasks import TaskSpec


@dataclass(frozen=True)
class OwnModule:
    """`factory(**arguments)` is the network: inputs [B, ...] as the task has them to outputs [B, K]."""

    factory: Callable[..., Any]
    arguments: Mapping[str, Any]
    name: str
    takes_tokens: ClassVar[bool] = True  # whether it does is found by calling it

    def __str__(self) -> str:
        return f"model=module ({self.name})"

    def problems(self, spec: TaskSpec) -> list[str]:
        """Why it does not support the task, found by building it and calling it with two points of zeros."""
        try:
            return function_problems(lambda: self.build(spec), spec, str(self))
        except UserError as error:
            return list(error.problems)

    def build(self, spec: TaskSpec) -> nn.Module:
        """A new network. Raises `UserError` if it could not be built, or its outputs are not [B, K]."""
        try:
            network = self.factory(**self.arguments)
        except Exception as error:
            raise UserError(
                f"Could not build {self} from ({_shown(self.arguments)}): {type(error).__name__}: {error}. "
                "Give its arguments as model.NAME=VALUE."
            ) from error
        if not isinstance(network, nn.Module):
            raise UserError(f"{self} must build a torch.nn.Module; got {type(network).__name__}.")
        if frozen := [n for n, p in network.named_parameters() if not p.requires_grad]:
            more = f" and {len(frozen) - 4} more" if len(frozen) > 4 else ""
            raise UserError(
                f"{self} must have no frozen parameters (requires_grad=False), since every parameter is trained; got "
                f"{', '.join(frozen[:4])}{more}. Make them buffers (register_buffer), or unfreeze them."
            )
        register_constants(network)
        network = network.float()  # runs are in single precision, also for a network built in double precision
        dtype = torch.int64 if spec.vocabulary else torch.float32
        try:
            with torch.no_grad(), evaluation_mode(network):
                outputs = network(torch.zeros(2, *spec.input_shape, dtype=dtype))
        except Exception as error:
            raise UserError(
                f"{self} failed on inputs {list(spec.input_shape)} of data={spec.name}: {type(error).__name__}: "
                f"{error}. Change its arguments by model.NAME=VALUE, or use another data set."
            ) from error
        one_logit = " (a single logit z of the second class is the two logits 0 and z)."
        shape = list(outputs.shape) if isinstance(outputs, torch.Tensor) else type(outputs).__name__
        if shape != [2, spec.num_outputs]:
            raise UserError(
                f"{self} must return {[2, spec.num_outputs]} for two points of data={spec.name}; got {shape}. It needs "
                f"one row per point with {spec.num_outputs} {'logits' if spec.kind == 'classification' else 'targets'}"
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
            f"model.{key} must be an argument of {name}.{did_you_mean(key, named)} It has {', '.join(named) or 'none'}."
            for key in arguments
            if key not in named
        ]
    problems += [
        f"{name} requires model.{n}=VALUE."
        for n, p in parameters.items()
        if n in named and p.default is p.empty and n not in arguments
    ]
    raise_all(problems)
    return OwnModule(factory, dict(arguments), name)


def _shown(arguments: Mapping[str, Any]) -> str:
    return ", ".join(f"{k}={v!r}" for k, v in arguments.items())
