"""Any classifier of torchvision by name, untrained, with an output layer for the task."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from bnn_runner.errors import UserError, did_you_mean
from bnn_runner.tasks import TaskSpec

AUXILIARY = {name: {"aux_logits": False, "init_weights": True} for name in ("googlenet", "inception_v3")}
"""Networks with auxiliary outputs in training are built without them."""
COLOURS = 3


@dataclass(frozen=True)
class Prepare:
    """Grey to three equal colours, then bilinear to `resize` × `resize` pixels, unless None."""

    resize: int | None

    def __call__(self, module: nn.Module, inputs: tuple[Tensor]) -> tuple[Tensor]:
        (x,) = inputs
        if x.shape[1] == 1:
            x = x.expand(-1, COLOURS, -1, -1)
        if self.resize is not None and x.shape[-2:] != (self.resize, self.resize):
            x = nn.functional.interpolate(x, (self.resize, self.resize), mode="bilinear", align_corners=False)
        return (x,)


@dataclass(frozen=True)
class Torchvision:
    """`name` of a torchvision classifier, `resize` of its inputs in pixels, `options` of its constructor.

    Parameters keep torchvision's names, since input preparation is a hook of the network and not a wrapper.
    """

    name: str = "resnet18"
    resize: int | None = None
    options: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.resize is not None and self.resize < 1:
            raise UserError(f"model.resize must be at least 1 pixel, or null to keep the size; got {self.resize}.")
        taken = sorted({"num_classes", "weights", "progress"} & set(self.options))
        if taken:
            raise UserError(
                f"model.options must not set {', '.join(taken)}: classes come from the data set, and networks start "
                "untrained. Leave it out; use model.weights=PATH for trained weights."
            )

    def problems(self, spec: TaskSpec) -> list[str]:
        from torchvision import models

        names = models.list_models(module=models)
        if self.name not in names:
            return [
                f"model.name must be a classifier of the installed torchvision; got {self.name}."
                f"{did_you_mean(self.name, names)} Its classifiers: {', '.join(names)}."
            ]
        if len(spec.input_shape) != 3 or spec.input_shape[0] not in (1, COLOURS):
            return [
                f"model=torchvision requires grey or colour images; got inputs {list(spec.input_shape)} of "
                f"data={spec.name}. Use model=mlp, or an image data set."
            ]
        return self._tried(spec)

    def _tried(self, spec: TaskSpec) -> list[str]:
        """Problems found by building it and a forward pass on the meta device, which computes no numbers."""
        what = f"model=torchvision with model.name={self.name}"
        try:
            module = self._empty(spec)
        except (TypeError, ValueError) as error:
            return [f"Could not build {what} and model.options={dict(self.options)}: {error}. Change model.options."]
        try:
            with torch.no_grad():
                outputs = module.train()(torch.zeros(2, *spec.input_shape, device="meta"))
        except (RuntimeError, ValueError, AssertionError) as error:
            return [
                f"{what} does not support images of {self._size(spec)} pixels: {' '.join(str(error).split())} "
                f"Use a larger model.resize; the original networks use 224."
            ]
        if not isinstance(outputs, Tensor) or outputs.shape != (2, spec.num_outputs):
            return [f"{what} must give one output per class. Use a classifier with a single output."]
        return []

    def _empty(self, spec: TaskSpec) -> nn.Module:
        """The network on the meta device; the few constructors that compute with tensors get real ones first."""
        try:
            with torch.device("meta"):
                return self.build(spec)
        except NotImplementedError:
            with torch.random.fork_rng(devices=[]):
                return self.build(spec).to("meta")

    def _size(self, spec: TaskSpec) -> str:
        height, width = spec.input_shape[1:] if self.resize is None else (self.resize, self.resize)
        return f"{height} × {width}"

    def build(self, spec: TaskSpec) -> nn.Module:
        from torchvision import models

        options = {**AUXILIARY.get(self.name, {}), **self.options}
        module: nn.Module = models.get_model(self.name, weights=None, num_classes=spec.num_outputs, **options)
        if self.resize is not None or spec.input_shape[0] != COLOURS:
            module.register_forward_pre_hook(Prepare(self.resize))
        return module
