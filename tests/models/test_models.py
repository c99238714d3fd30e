"""Architectures: published sizes, training in lanes, forward-mode derivatives, invalid settings."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.func import functional_call, jvp

from bnn_runner.curvature.jacobians import Jacobians
from bnn_runner.errors import UserError
from bnn_runner.models.cnn import CNN
from bnn_runner.models.layers import FilterResponseNorm, StandardisedConv, ThresholdedLinear
from bnn_runner.models.likelihoods import NoiseRule
from bnn_runner.models.priors import Isotropic
from bnn_runner.models.resnet18 import ResNet18
from bnn_runner.models.text_transformer import TextTransformer
from bnn_runner.models.torchvision import Torchvision
from bnn_runner.models.vit import ViT
from bnn_runner.models.wide_resnet import WideResNet
from bnn_runner.tasks import TaskSpec
from bnn_runner.testing.problems import fitting_task
from bnn_runner.training.engine import LaneTrainer
from bnn_runner.training.schedules import Schedule
from bnn_runner.training.state import Lane, TrainingConfig
from tests.choices import MODELS, make, small_model
from tests.problems import make_network, make_task

MNIST = TaskSpec("mnist", "classification", (1, 28, 28), 10, 0.1)
CIFAR = TaskSpec("cifar10", "classification", (3, 32, 32), 10, 0.1)


def count(choice: str, spec: TaskSpec, ending: str = "") -> int:
    with torch.device("meta"):
        module = make("model", choice).build(spec)
    return sum(p.numel() for n, p in module.named_parameters() if n.endswith(ending))


def test_published_numbers_of_parameters() -> None:
    """Planted bugs: a bias next to a norm; a shortcut where shapes agree; a stem of 7 × 7; one block too few."""
    assert count("resnet18", CIFAR) == 11_173_962
    assert count("lenet_small", MNIST, "weight") == 29_088
    assert count("lenet", MNIST) == 61_706
    assert count("wrn16_4", CIFAR) == 2_748_890
    assert count("torchvision", TaskSpec("images", "classification", (3, 224, 224), 1000, 0.1)) == 11_689_512
    # Fixup: no norm (9,600 numbers less), 8 blocks of 5 scalars, one of the stem and one of the head.
    assert count("resnet18_fixup", CIFAR) == 11_173_962 - 9_600 + 42
    # Filter response: a threshold for each channel of the 17 rectifiers more.
    assert count("resnet18_frn", CIFAR) == 11_173_962 + 64 + 4 * (64 + 128 + 256 + 512)


def test_fixup_starts_at_zero_outputs_and_identity_blocks() -> None:
    """Planted bugs: a last convolution that does not start at zero; no scaling of the first by depth."""
    torch.manual_seed(0)
    network = ResNet18(norm="none", widths=(16, 32), blocks=(4, 5)).build(CIFAR)
    x = torch.randn(2, 3, 32, 32)
    assert torch.equal(network(x), torch.zeros(2, 10))
    block = network.blocks[1]  # type: ignore[index]
    positive = torch.randn(2, 16, 8, 8).abs()
    assert torch.equal(block(positive), positive)
    assert float(block.conv1.weight.detach().std()) == pytest.approx((2 / (9 * 16)) ** 0.5 / 3, rel=0.05)


def test_layers_against_their_formulas() -> None:
    """Planted bugs: the mean subtracted by filter response norm; the raw weight convolved with."""
    x = torch.randn(2, 3, 4, 5, dtype=torch.float64)
    norm = FilterResponseNorm(3).double()
    with torch.no_grad():
        norm.scale.copy_(torch.tensor([1.0, 2, 3]))
        norm.shift.copy_(torch.tensor([0.5, 0, -1]))
    channel = x[1, 2]
    expected = 3 * channel / (channel.square().mean() + 1e-6).sqrt() - 1
    torch.testing.assert_close(norm(x)[1, 2], expected)
    rectifier = ThresholdedLinear(3).double()
    with torch.no_grad():
        rectifier.threshold.copy_(torch.tensor([0.0, -0.5, 0.5]))
    assert torch.equal(rectifier(x)[:, 1], x[:, 1].clamp_min(-0.5))

    conv = StandardisedConv(3, 4, 3, 1).double()
    filters = conv.weight.detach()
    standardised = torch.stack([(f - f.mean()) / f.std(correction=0) for f in filters]) * (2 / 27) ** 0.5
    torch.testing.assert_close(conv(x), torch.nn.functional.conv2d(x, standardised, conv.bias, padding=1))
    moved = functional_call(conv, {"weight": 7 * filters + 0.3, "bias": conv.bias.detach()}, (x,))
    torch.testing.assert_close(moved, conv(x))


def test_padding_does_not_matter_and_order_does() -> None:
    """Planted bugs: padding in the mean or attended to; positions left out."""
    task = make_task("classification", (6,), 2, vocabulary=9)
    network = make_network(TextTransformer(width=8, depth=2, heads=2), task)
    ids = torch.tensor([[3, 5, 2, 0, 0, 0], [5, 3, 2, 0, 0, 0], [0, 0, 0, 0, 0, 0]])
    outputs = network(ids)
    moved = network.parameters["embedding.weight"].clone()
    moved[0] += 10
    positions = network.parameters["positions.table"].clone()
    positions[3:] += 10
    changes = {"embedding.weight": moved, "positions.table": positions}
    again = functional_call(network.module.eval(), {**network.tensors, **changes}, (ids,))
    torch.testing.assert_close(again, outputs)
    assert float((outputs[0] - outputs[1]).abs().max()) > 1e-6
    assert bool(torch.isfinite(outputs).all())


@pytest.mark.filterwarnings("ignore:`torch.jit.script`:FutureWarning")  # torch's own, at its first jvp
@pytest.mark.parametrize("name", MODELS)
def test_forward_mode_derivatives_are_those_of_the_jacobian(name: str) -> None:
    """Planted bug: attention through torch's fused path, which has no forward-mode derivative."""
    task = fitting_task(small_model(name), "classification")
    network, x = make_network(small_model(name), task), task.test.inputs[:2]
    g = torch.Generator().manual_seed(0)
    moved = {n: torch.randn(p.shape, generator=g, dtype=p.dtype) for n, p in network.parameters.items()}
    module = network.module.eval()

    def outputs(parameters: dict[str, Tensor]) -> Tensor:
        return functional_call(module, {**parameters, **network.buffers}, (x,))

    _, forward = jvp(outputs, (network.parameters,), (moved,))
    pushed = Jacobians(network)(x).jvp(torch.cat([m.flatten() for m in moved.values()]))
    torch.testing.assert_close(forward, pushed, rtol=1e-7, atol=1e-9 * float(forward.abs().max()))


@pytest.mark.parametrize("name", MODELS)
def test_lanes_train_as_networks_alone(name: str) -> None:
    """Stacked training equals training alone, running statistics included (float64, three steps).

    Planted bugs: batch statistics shared by lanes; an in-place update of a buffer that vmap loses.
    """
    model = small_model(name)
    task = fitting_task(model, "classification")
    schedule = Schedule(optimizer="sgd", epochs=3, batch_size=4 if len(task.train) == 4 else 10, lr=0.01)
    settings: dict[str, Any] = {"noise": NoiseRule("learned", None), "dtype": torch.float64, "stack": "always"}
    config = TrainingConfig(model=model, schedule=schedule, prior=Isotropic(1.0), **settings)
    lanes = [Lane(task, seed) for seed in (1, 2)]
    device = torch.device("cpu")
    joint = LaneTrainer(config, lanes, device)
    assert joint.strategy in ("native", "vmap")
    together = joint.train(None, lambda *_: None)
    for lane, found in zip(lanes, together, strict=True):
        (alone,) = LaneTrainer(config, [lane], device).train(None, lambda *_: None)
        for n, t in alone.tensors.items():
            torch.testing.assert_close(found.tensors[n], t, rtol=1e-9, atol=1e-9)
        start = dict(LaneTrainer(config, [lane], device).module.named_parameters())
        assert any(not torch.equal(alone.parameters[n], p) for n, p in start.items())


# ------------------------------------------------------------------------------------- torchvision


def test_torchvision_names_and_inputs() -> None:
    """Planted bugs: a wrapper that renames the weights; grey images refused; resize without effect."""
    import torchvision

    model = Torchvision("mobilenet_v3_small", resize=40)
    module = model.build(MNIST)
    plain = torchvision.models.mobilenet_v3_small(num_classes=10)
    assert [(n, p.shape) for n, p in module.named_parameters()] == [(n, p.shape) for n, p in plain.named_parameters()]
    plain.load_state_dict(module.state_dict())
    x = torch.randn(2, 1, 28, 28)
    larger = torch.nn.functional.interpolate(x.expand(-1, 3, -1, -1), (40, 40), mode="bilinear", align_corners=False)
    torch.testing.assert_close(module.eval()(x), plain.eval()(larger))


REFUSED = [
    (Torchvision("resnet81"), CIFAR, "Did you mean resnet18"),
    (Torchvision("fasterrcnn_resnet50_fpn"), CIFAR, "must be a classifier"),
    (Torchvision("vit_b_16"), CIFAR, "model.resize"),
    (Torchvision("alexnet"), MNIST, "28 × 28"),
    (Torchvision("resnet18"), TaskSpec("table", "regression", (4,), 1, 0.1), "requires grey or colour images"),
    (Torchvision("mobilenet_v2", options={"nonsense": 1}), CIFAR, "Change model.options"),
    (Torchvision("googlenet", options={"aux_logits": True}), CIFAR, "single output"),
]


@pytest.mark.parametrize(("model", "spec", "message"), REFUSED, ids=[r[0].name for r in REFUSED])
def test_torchvision_refuses_with_a_reason(model: Torchvision, spec: TaskSpec, message: str) -> None:
    """Planted bugs: a detector taken for a classifier; an error of a layer's in the middle of a run."""
    state = torch.get_rng_state()
    (problem,) = model.problems(spec)
    assert message in problem and "model" in problem
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize("name", ["googlenet", "regnet_y_400mf"])
def test_torchvision_networks_that_are_built_differently(name: str) -> None:
    """Auxiliary outputs left out, and a constructor that calculates with tensors."""
    assert Torchvision(name).problems(CIFAR) == []


IMPOSSIBLE = [
    lambda: CNN(channels=(4, 4), kernels=(3,)),
    lambda: CNN(channels=(4,), kernels=(2,)),
    lambda: CNN(channels=(6,), kernels=(3,), norm="group", groups=4),
    lambda: ResNet18(widths=(8, 16), blocks=(1,)),
    lambda: ResNet18(norm="group", groups=3),
    lambda: WideResNet(depth=12),
    lambda: WideResNet(norm="group", groups=3),
    lambda: ViT(width=10, heads=4),
    lambda: ViT(patch=0),
    lambda: TextTransformer(depth=0),
    lambda: Torchvision(resize=0),
    lambda: Torchvision(options={"weights": "DEFAULT"}),
]


def test_sizes_that_cannot_be_are_refused() -> None:
    """Planted bug: a traceback of torch's when the network is built."""
    for impossible in IMPOSSIBLE:
        with pytest.raises(UserError, match=r"model\."):
            impossible()
