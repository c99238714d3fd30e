"""Networks whose layers are used in ways that the factored forms do not know: exact all the same, or refused."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call, jacrev, jvp

from bnn_runner.base import Network
from bnn_runner.curvature.jacobians import Jacobians
from bnn_runner.curvature.parameter_subset import last_layer_names
from bnn_runner.errors import RunFailed
from bnn_runner.methods.laplace import Laplace
from bnn_runner.models.layers import Attention
from bnn_runner.tasks import TaskSpec
from tests.problems import context, make_network, make_task


class Tied(nn.Module):
    """A weight called through its module, read again by hand."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.out = nn.Linear(3, 3), nn.Linear(3, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(torch.tanh(self.a(x)) @ self.a.weight)


class TwoNames(nn.Module):
    """One parameter under two names, of which `named_parameters` shows one."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.out = nn.Linear(3, 3), nn.Linear(3, 3), nn.Linear(3, 2)
        self.b.weight = self.a.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.b(torch.tanh(self.a(x))))


class Twice(nn.Module):
    """A module called twice."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.norm, self.out = nn.Linear(3, 3), nn.LayerNorm(3), nn.Linear(3, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.norm(self.a(torch.tanh(self.norm(self.a(x))))))


class Standardised(nn.Linear):
    """A subclass that acts with another matrix than its weight."""

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.linear(x, self.weight / self.weight.norm(dim=1, keepdim=True), self.bias)


class Exponential(nn.Module):
    """A parametrisation."""

    def forward(self, weight: Tensor) -> Tensor:
        return weight.exp()


class Unseen(nn.Module):
    """Read by hand alone, called by keyword, a parametrised weight, a parameter that nothing uses."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(3, 3), nn.Linear(3, 3), Standardised(3, 3)
        self.d = nn.utils.parametrize.register_parametrization(nn.Linear(3, 3), "weight", Exponential())
        self.out, self.unused = nn.Linear(3, 2), nn.Parameter(torch.zeros(2))

    def forward(self, x: Tensor) -> Tensor:
        h = nn.functional.linear(x, self.a.weight, self.a.bias)
        return self.out(self.d(torch.tanh(self.c(torch.tanh(self.b(input=h))))))


class PositionsFirst(nn.Module):
    """Torch's own attention with positions before points, two of them: as many as points in the check."""

    def __init__(self, batch_first: bool = False) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(4, 2, 5, dropout=0.3, batch_first=batch_first)
        self.encoder = nn.TransformerEncoder(layer, 1, enable_nested_tensor=False)
        self.into, self.out = nn.Linear(3, 4), nn.Linear(4, 2)
        self.batch_first = batch_first

    def forward(self, x: Tensor) -> Tensor:
        h = torch.stack([self.into(x), self.into(-x)], dim=1 if self.batch_first else 0)
        return self.out(self.encoder(h).mean(1 if self.batch_first else 0))


class Convolutions(nn.Module):
    """Padding by name (even kernel, dilation), padding by reflection, groups, an affine instance norm."""

    def __init__(self) -> None:
        super().__init__()
        self.same = nn.Conv2d(1, 4, (2, 3), padding="same", dilation=(1, 2))
        self.valid = nn.Conv2d(4, 4, 2, padding="valid")
        self.reflected = nn.Conv2d(4, 4, 3, padding=1, padding_mode="reflect")
        self.grouped, self.norm = nn.Conv2d(4, 4, 3, groups=2), nn.InstanceNorm2d(4, affine=True)
        self.out = nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        for layer in (self.same, self.valid, self.reflected, self.norm, self.grouped):
            x = torch.tanh(layer(x))
        return self.out(x.mean((2, 3)))


@dataclass(frozen=True)
class Made:
    """A model of a fixed module."""

    module: Callable[[], nn.Module]

    def problems(self, spec: TaskSpec) -> list[str]:
        return []

    def build(self, spec: TaskSpec) -> nn.Module:
        return self.module()


def network_of(module: Callable[[], nn.Module], shape: tuple[int, ...] = (3,)) -> tuple[Network, Tensor]:
    task = make_task("regression", shape, 2, num_train=3, num_test=3)
    return make_network(Made(module), task), task.test.inputs


CASES: dict[str, tuple[Callable[[], nn.Module], set[str]]] = {
    "tied": (Tied, {"a.weight"}),
    "two names": (TwoNames, {"a.weight"}),
    "twice": (Twice, set()),
    "unseen": (
        Unseen,
        {
            "a.weight",
            "a.bias",
            "c.weight",
            "c.bias",
            "unused",
            "d.parametrizations.weight.original",
        },
    ),
    "convolutions": (Convolutions, {f"{m}.{k}" for m in ("reflected", "grouped", "norm") for k in ("weight", "bias")}),
}


@pytest.mark.filterwarnings("ignore:Using padding='same'")  # of torch's own reference
@pytest.mark.parametrize("case", CASES)
def test_unusual_use_of_a_layer_is_found_and_exact(case: str) -> None:
    """Planted bugs: `_check` left out (tied, unseen); the derivatives of one of two calls; an odd padding at the
    front; a tensor that is never called given zeros."""
    module, general = CASES[case]
    network, x = network_of(module, (1, 5, 6) if case == "convolutions" else (3,))
    shape = network.module.eval()
    reference = jacrev(lambda p: functional_call(shape, {**p, **network.buffers}, (x,)))(network.parameters)
    jacobians = Jacobians(network)
    found = jacobians(x)
    for name, j in reference.items():
        torch.testing.assert_close(found.tensors[name].dense(), j.flatten(2), rtol=1e-8, atol=1e-10)
    assert {n for n in network.parameters if jacobians.rule(n) == "general"} == general


@pytest.mark.parametrize("batch_first", [False, True])
def test_torchs_own_attention_has_its_curvature(batch_first: bool) -> None:
    """Planted bugs (PITFALLS B7): the fused path, which no hook sees; positions taken for points."""
    network, x = network_of(lambda: PositionsFirst(batch_first))
    module = network.module.eval()
    rows = []
    for point in x.split(1):
        tensors = {n: t.detach().requires_grad_() for n, t in network.parameters.items()}
        (outputs,) = functional_call(module, tensors, (point,))
        rows.append([torch.autograd.grad(o, list(tensors.values()), retain_graph=True) for o in outputs])
    found = Jacobians(network)(x)
    for i, name in enumerate(network.parameters):
        expected = torch.stack([torch.stack([row[i].flatten() for row in point]) for point in rows])
        torch.testing.assert_close(found.tensors[name].dense(), expected, rtol=1e-8, atol=1e-10)
        assert float(expected.abs().max()) > 1e-6 or "in_proj_bias" in name
    assert torch.backends.mha.get_fastpath_enabled()


class Mixing(nn.Module):
    """Points that see each other, or outputs that change from call to call."""

    def __init__(self, random: bool) -> None:
        super().__init__()
        self.out, self.random = nn.Linear(3, 2), random

    def forward(self, x: Tensor) -> Tensor:
        return self.out(nn.functional.dropout(x) if self.random else x - x.mean(0))


@pytest.mark.parametrize("random", [True, False])
def test_what_is_no_function_of_the_point_is_refused(random: bool) -> None:
    """Planted bug: a Jacobian summed over points that depend on each other."""
    network, x = network_of(lambda: Mixing(random))
    with pytest.raises(RunFailed, match="evaluation mode"):
        Jacobians(network)(x)


@pytest.mark.parametrize("module", [Tied, TwoNames, Unseen], ids=["tied", "two names", "unseen"])
@pytest.mark.parametrize("structure", ["kfac", "diag"])
def test_general_tensors_have_their_exact_diagonal(module: Callable[[], nn.Module], structure: str) -> None:
    """Planted bugs: a Kronecker factor for a tensor that the check took out; a bias given its weight's factor then."""
    network, _ = network_of(module)
    task = make_task("regression", (3,), 2, num_train=9)
    posterior = Laplace(structure=structure).fit(task, [network], context())  # type: ignore[arg-type]
    shape = network.module.eval()
    x = task.train.inputs
    reference = jacrev(lambda p: functional_call(shape, {**p, **network.buffers}, (x,)))(network.parameters)
    root = network.likelihood.curvature_root(network(x))  # type: ignore[attr-defined]
    spectra = {g.name: b.spectrum for g, b in zip(posterior.gaussian.groups, posterior.gaussian.blocks, strict=True)}  # type: ignore[union-attr]
    rules = {n: posterior.jacobians.rule(n) for n in network.parameters}
    general = [n for n in network.parameters if structure == "diag" or rules[n] == "general"]
    assert general
    for name in general:
        exact = torch.einsum("bkc,bkp->bcp", root, reference[name].flatten(2)).square().sum((0, 1))
        torch.testing.assert_close(spectra[name], exact, rtol=1e-8, atol=1e-10)


class Scaled(nn.Module):
    """A linear layer whose outputs are not the network's."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.out, self.scale = nn.Linear(3, 2), nn.Linear(2, 2), nn.Parameter(torch.full((), 2.0))

    def forward(self, x: Tensor) -> Tensor:
        return self.out(torch.tanh(self.body(x))) * self.scale


class TiedHead(nn.Module):
    """An output layer whose weight is another layer's too."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.out = nn.Linear(3, 3), nn.Linear(3, 3)
        self.out.weight = self.body.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.out(torch.tanh(self.body(x)))


@pytest.mark.parametrize(
    ("module", "told"), [(Scaled, "ends in a linear layer"), (TiedHead, "shares them with another layer")]
)
def test_a_last_layer_that_is_none_is_refused(module: Callable[[], nn.Module], told: str) -> None:
    """Planted bug: the linear layer called last, whatever is done with its outputs."""
    network, x = network_of(module)
    with pytest.raises(RunFailed, match=told):
        last_layer_names(network, x)


@pytest.mark.filterwarnings("ignore:`torch.jit.script`:FutureWarning")  # torch's own, at its first jvp
def test_attention_is_torchs_and_ignores_padding() -> None:
    """Planted bugs: a scale of 1/√width; heads and positions swapped; masked queries instead of masked keys."""
    torch.manual_seed(0)
    own, theirs = Attention(6, 2).double(), nn.MultiheadAttention(6, 2, batch_first=True).double()
    with torch.no_grad():
        theirs.in_proj_weight.copy_(own.qkv.weight)
        theirs.in_proj_bias.copy_(own.qkv.bias)
    theirs.out_proj = own.out  # type: ignore[assignment]
    x = torch.randn(3, 5, 6, dtype=torch.float64)
    mask = torch.tensor([[True] * 5, [True, True, False, False, False], [False] * 5])
    torch.testing.assert_close(own(x), theirs(x, x, x, need_weights=False)[0])
    masked = own(x, mask)
    torch.testing.assert_close(masked[:2], theirs(x[:2], x[:2], x[:2], key_padding_mask=~mask[:2])[0])
    assert bool(torch.isfinite(masked).all())
    direction = torch.randn_like(x)
    _, forward = jvp(lambda t: own(t, mask), (x,), (direction,))
    step = 1e-6
    central = (own(x + step * direction, mask) - own(x - step * direction, mask)) / (2 * step)
    torch.testing.assert_close(forward, central, rtol=1e-6, atol=1e-8)
