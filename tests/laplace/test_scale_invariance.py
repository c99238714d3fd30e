"""Scale-invariant weights are found by what the network does, for norms of any kind, and nowhere else."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from bnn_runner.base import Network
from bnn_runner.laplace.scale_invariance import scale_invariant
from bnn_runner.models.cnn import CNN
from bnn_runner.models.layers import FilterResponseNorm, ThresholdedLinear
from bnn_runner.models.likelihoods import Categorical
from bnn_runner.models.mlp import MLP
from bnn_runner.tasks import TaskSpec
from tests.zoo import WeightNormed

WIDTH, CLASSES = 6, 3


class OwnNorm(nn.Module):
    """A person's own layer norm: eps is an argument, under another name."""

    def __init__(self, width: int, epsilon: float) -> None:
        super().__init__()
        self.gain, self.epsilon = nn.Parameter(torch.ones(width)), epsilon

    def forward(self, x: Tensor) -> Tensor:
        x = x - x.mean(-1, keepdim=True)
        return self.gain * x / torch.sqrt(x.square().mean(-1, keepdim=True) + self.epsilon)


class HiddenEps(nn.Module):
    """An RMS norm whose eps is written into its code."""

    def forward(self, x: Tensor) -> Tensor:
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6)


class FrozenBatchNorm(nn.Module):
    """Running statistics and scales as buffers, as in detection networks; it has no training mode."""

    def __init__(self, width: int, functional: bool = False) -> None:
        super().__init__()
        for name, value in (("weight", 1.0), ("bias", 0.0), ("running_mean", 0.3), ("running_var", 2.0)):
            self.register_buffer(name, torch.full((width,), value))
        self.eps, self.functional = 1e-5, functional

    def forward(self, x: Tensor) -> Tensor:
        mean, var = self.get_buffer("running_mean"), self.get_buffer("running_var")
        if self.functional:
            return F.batch_norm(x, mean, var, self.get_buffer("weight"), self.get_buffer("bias"), eps=self.eps)
        return (x - mean) * torch.rsqrt(var + self.eps) * self.get_buffer("weight") + self.get_buffer("bias")


class Fixup(nn.Module):
    """A residual branch that starts at zero, with single numbers as biases and scale (Zhang et al. 2019)."""

    def __init__(self) -> None:
        super().__init__()
        self.into, self.conv1, self.conv2 = nn.Linear(4, WIDTH), nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.out = nn.Linear(WIDTH, CLASSES)
        self.scale, self.shift = nn.Parameter(torch.ones(1)), nn.Parameter(torch.zeros(1))

    def forward(self, x: Tensor) -> Tensor:
        h = torch.relu(self.into(x))
        return self.out(h + self.scale * self.conv2(torch.relu(self.conv1(h + self.shift))))


def mlp(norm: nn.Module, activation: nn.Module | None = None) -> nn.Module:
    """0: linear, 1: the norm, 2: activation, 3: linear to the outputs."""
    return nn.Sequential(nn.Linear(4, WIDTH), norm, activation or nn.Tanh(), nn.Linear(WIDTH, CLASSES))


def conv(norm: nn.Module, rectifier: nn.Module) -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(2, WIDTH, 3, padding=1), norm, rectifier, nn.Flatten(), nn.Linear(WIDTH * 36, CLASSES)
    )


def of_spec(model: Any, shape: tuple[int, ...]) -> nn.Module:
    built: nn.Module = model.build(TaskSpec("made", "classification", shape, CLASSES, 0.1))
    return built


NORMED: dict[str, tuple[Callable[[], nn.Module], set[str], tuple[int, ...]]] = {
    "batch": (lambda: mlp(nn.BatchNorm1d(WIDTH)), {"0"}, (4,)),
    "batch, frozen": (lambda: mlp(FrozenBatchNorm(WIDTH)), {"0"}, (4,)),
    "batch, frozen, by function": (lambda: mlp(FrozenBatchNorm(WIDTH, functional=True)), {"0"}, (4,)),
    "layer": (lambda: mlp(nn.LayerNorm(WIDTH)), {"0"}, (4,)),
    "group": (lambda: mlp(nn.GroupNorm(2, WIDTH)), {"0"}, (4,)),
    "rms": (lambda: mlp(nn.RMSNorm(WIDTH)), {"0"}, (4,)),
    "instance": (lambda: conv(nn.InstanceNorm2d(WIDTH), nn.Tanh()), {"0"}, (2, 6, 6)),
    "a person's own": (lambda: mlp(OwnNorm(WIDTH, 1e-3)), {"0"}, (4,)),
    "eps in the code": (lambda: mlp(HiddenEps()), {"0"}, (4,)),
    "filter response": (
        lambda: conv(FilterResponseNorm(WIDTH), ThresholdedLinear(WIDTH)),
        {"0"},
        (2, 6, 6),
    ),
    "weight standardised": (
        lambda: of_spec(CNN(channels=(4, 4), kernels=(3, 3), norm="weight_standardised", activation="tanh"), (2, 6, 6)),
        {"convs.0", "convs.1"},
        (2, 6, 6),
    ),
    "weight norm": (lambda: WeightNormed(), {"a.parametrizations.weight"}, (3,)),
}  # fmt: skip
PLAIN: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "tanh": (lambda: mlp(nn.Identity()), (4,)),
    "relu": (lambda: mlp(nn.Identity(), nn.ReLU()), (4,)),
    "relu without biases": (
        lambda: nn.Sequential(nn.Linear(4, WIDTH, bias=False), nn.ReLU(), nn.Linear(WIDTH, CLASSES, bias=False)),
        (4,),
    ),
    "dropout": (lambda: mlp(nn.Dropout(0.5)), (4,)),
    "residual": (lambda: of_spec(MLP(hidden=(5, 5), residual=True, norm="none"), (4,)), (4,)),
    "residual, fixup": (lambda: Fixup(), (4,)),
}


def network_of(module: nn.Module, dtype: torch.dtype = torch.float32) -> Network:
    """Trained-looking: every weight moved, so that biases are not 0; running statistics not those of the data."""
    random = torch.Generator().manual_seed(1)
    parameters = {
        n: (p + 0.3 * torch.randn(p.shape, generator=random)).detach().to(dtype) for n, p in module.named_parameters()
    }
    return Network(module.eval(), parameters, dict(module.named_buffers()), Categorical(), {})


def found_in(module: nn.Module, shape: tuple[int, ...]) -> tuple[str, ...]:
    network = network_of(module)
    x = torch.randn(12, *shape, generator=torch.Generator().manual_seed(2))
    before = network(x)
    modes, eps = [m.training for m in module.modules()], [dict(vars(m)).get("eps") for m in module.modules()]
    buffers = {n: b.clone() for n, b in network.buffers.items()}
    found = scale_invariant(network, x, tuple(network.parameters))
    assert not found.notes
    assert torch.equal(network(x), before) and all(torch.equal(b, network.buffers[n]) for n, b in buffers.items())
    assert [m.training for m in module.modules()] == modes
    assert [dict(vars(m)).get("eps") for m in module.modules()] == eps
    return found.names


@pytest.mark.parametrize("name", NORMED)
def test_norms_of_every_kind_are_found(name: str) -> None:
    """Planted bugs: by class; frozen statistics; a bias that must not scale; eps by one name; an eps without a name;
    the output layer, a norm's own scale, or a weight-norm's length taken in; a module left changed."""
    torch.manual_seed(0)
    build, owners, shape = NORMED[name]
    found = found_in(build(), shape)
    assert {n.rpartition(".")[0] for n in found} == owners
    if name == "weight standardised":
        assert found == ("convs.0.weight", "convs.1.weight")
    if name == "weight norm":
        assert found == ("a.parametrizations.weight.original1",)


@pytest.mark.parametrize("name", PLAIN)
def test_nothing_is_found_without_a_norm(name: str) -> None:
    """A softmax does not see a shift of its logits, but their scale; ReLU networks are homogeneous, not invariant; zero
    weights (fixup) can be scaled anyway. Planted bugs: classes compared; branches that are switched off."""
    torch.manual_seed(0)
    build, shape = PLAIN[name]
    assert found_in(build(), shape) == ()
    module = build()
    for n, p in module.named_parameters():  # as fixup starts
        if "conv2" in n or "out" in n:
            nn.init.zeros_(p)
    network = Network(module.eval(), {n: p.detach() for n, p in module.named_parameters()}, {}, Categorical(), {})
    assert scale_invariant(network, torch.randn(12, *shape), tuple(network.parameters)).names == ()


def test_a_scale_that_a_later_norm_removes_is_found_too() -> None:
    """γ and β of a batch norm before ReLU, a layer without bias and a norm: by function, as any other weight."""
    torch.manual_seed(0)
    module = nn.Sequential(
        nn.Linear(4, WIDTH), nn.BatchNorm1d(WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH, bias=False), nn.LayerNorm(WIDTH),
        nn.Tanh(), nn.Linear(WIDTH, CLASSES),
    )  # fmt: skip
    found = found_in(module, (4,))
    assert found == ("0.weight", "0.bias", "1.weight", "1.bias", "3.weight")


def test_a_network_that_does_not_run_in_this_way_has_none_and_a_note() -> None:
    """Planted bug: a run that ends because of a check."""

    class Half(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.out, self.norm = nn.Linear(4, 4), nn.Linear(4, 3), nn.LayerNorm(4)

        def forward(self, x: Tensor) -> Tensor:
            return self.out(self.norm(self.a(x.float())))  # the weights are float64 here

    module = Half()
    network, x = network_of(module), torch.randn(12, 4)
    found = scale_invariant(network, x, tuple(network.parameters))
    assert found.names == () and "not looked for" in found.notes[0] and "RuntimeError" in found.notes[0]
    assert network(x).shape == (12, 3) and module.norm.eps == 1e-5


def test_only_the_asked_for_are_returned() -> None:
    network = network_of(mlp(nn.BatchNorm1d(WIDTH)))
    assert scale_invariant(network, torch.randn(12, 4), ("0.bias", "3.weight")).names == ("0.bias",)
