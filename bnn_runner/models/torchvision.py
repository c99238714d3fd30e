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
"""Networks that would give several outputs in training are built without the auxiliary ones."""
COLOURS = 3


@dataclass(frozen=True)
class Prepare:
    """Grey to three equal colours, then bilinear to `resize` × `resize` pixels where that is a number."""

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

    Parameters have torchvision's own names: input preparation is a hook of the network, not a wrapper.
    """

    name: str = "resnet18"
    resize: int | None = None
    options: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.resize is not None and self.resize < 1:
            raise UserError(f"model.resize={self.resize} is no size. Give pixels, or null to leave images as they are.")
        taken = sorted({"num_classes", "weights", "progress"} & set(self.options))
        if taken:
            raise UserError(
                f"model.options may not set {', '.join(taken)}. Classes come from the data set, and networks start "
                "untrained. Leave it out; model.weights=PATH gives trained weights."
            )

    def problems(self, spec: TaskSpec) -> list[str]:
        from torchvision import models

        names = models.list_models(module=models)
        if self.name not in names:
            return [
                f"model.name={self.name} is no classifier of this torchvision.{did_you_mean(self.name, names)} "
                f"Its classifiers: {', '.join(names)}."
            ]
        if len(spec.input_shape) != 3 or spec.input_shape[0] not in (1, COLOURS):
            return [
                f"model=torchvision cannot take the inputs of data={spec.name}, which have shape "
                f"{list(spec.input_shape)}. It needs grey or colour images. Use model=mlp, or an image data set."
            ]
        return self._tried(spec)

    def _tried(self, spec: TaskSpec) -> list[str]:
        """What building it and a forward pass without numbers (on the meta device) run into."""
        what = f"model=torchvision with model.name={self.name}"
        try:
            module = self._empty(spec)
        except (TypeError, ValueError) as error:
            return [f"{what} and model.options={dict(self.options)} cannot be built. {error}. Change model.options."]
        try:
            with torch.no_grad():
                outputs = module.train()(torch.zeros(2, *spec.input_shape, device="meta"))
        except (RuntimeError, ValueError, AssertionError) as error:
            return [
                f"{what} cannot take images of {self._size(spec)} pixels. {' '.join(str(error).split())} "
                f"Set model.resize to a larger size; the original networks take 224."
            ]
        if not isinstance(outputs, Tensor) or outputs.shape != (2, spec.num_outputs):
            return [f"{what} does not give one output a class. Choose a classifier with a single output."]
        return []

    def _empty(self, spec: TaskSpec) -> nn.Module:
        """The network without numbers; a few constructors calculate with tensors, which takes real ones first."""
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
