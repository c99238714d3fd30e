"""What must hold for every model, found by globbing conf/model; each test names the bug that it catches."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch import Tensor
from torch.func import functional_call, jacrev

from bnn_runner.base import Likelihood
from bnn_runner.curvature.jacobians import Jacobians
from bnn_runner.curvature.parameter_subset import last_layer_names
from bnn_runner.training.lanes import lane_forward
from tests.choices import KINDS, MODELS, fitting_task, kinds, small_model, unlike
from tests.problems import make_network

CASES = [(model, kind) for model in MODELS for kind in kinds(model)]
every_case = pytest.mark.parametrize(("name", "kind"), CASES)
STACKING = [
    m
    for m in MODELS
    if getattr(small_model(m).build(fitting_task(small_model(m), KINDS[0]).spec), "stacks_lanes", False)
]


def test_every_model_is_tested() -> None:
    """Planted bug: a glob that finds one folder too few."""
    assert {"mlp", "lenet", "resnet20", "resnet18", "vit", "text_transformer"} <= set(MODELS) and len(MODELS) >= 20
    assert {model for model, _ in CASES} == set(MODELS)
    assert {"mlp", "mlp_batchnorm", "mlp_layernorm", "mlp_residual"} <= set(STACKING)


@every_case
def test_points_are_independent_in_evaluation_mode(name: str, kind: str) -> None:
    """Planted bugs: batch statistics in evaluation mode; an axis of the batch mixed into the features."""
    task = fitting_task(small_model(name), kind)
    network, x = make_network(small_model(name), task), task.test.inputs
    whole = network(x)
    assert whole.shape == (len(x), task.spec.num_outputs)
    torch.testing.assert_close(torch.cat([network(p) for p in x.split(1)]), whole, rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(
        network(torch.cat([unlike(x), x]).flip(0))[: len(x)].flip(0), whole, rtol=1e-9, atol=1e-9
    )
    assert float((whole[0] - whole[1]).abs().max()) > 1e-7


@every_case
def test_all_weights_go_through_functional_call(name: str, kind: str) -> None:
    """Planted bugs: a weight kept beside the parameters (a closure, a cache); a parameter that the output ignores."""
    task = fitting_task(small_model(name), kind)
    network, x = make_network(small_model(name), task), task.test.inputs
    module = network.module.eval()
    own = {n: p.detach().clone() for n, p in module.named_parameters()}
    at_own = module(x)
    result = functional_call(module, network.tensors, (x,))
    assert float((result - at_own).detach().abs().max()) > 1e-6
    assert all(torch.equal(p, own[n]) for n, p in module.named_parameters())
    with torch.no_grad():
        for n, p in module.named_parameters():
            p.copy_(network.parameters[n])
    torch.testing.assert_close(module(x), result)
    grads = torch.autograd.grad(module(x).square().sum(), list(module.parameters()), allow_unused=True)
    unused = [n for (n, _), g in zip(module.named_parameters(), grads, strict=True) if g is None]
    assert unused == []


@every_case
def test_same_seed_same_initial_weights(name: str, kind: str) -> None:
    """Planted bug: initial weights from a generator of the model's own, which the caller's seed does not reach."""
    model = small_model(name)
    task = fitting_task(model, kind)
    weights = []
    for seed in (0, 0, 1):
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            weights.append(torch.cat([p.detach().flatten() for p in model.build(task.spec).parameters()]))
    assert torch.equal(weights[0], weights[1]) and not torch.equal(weights[0], weights[2])


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("name", STACKING)
def test_stacked_lanes_are_separate_networks(name: str, training: bool) -> None:
    """Planted bugs: batch statistics shared by the lanes; running variance without Bessel's correction; lane and
    batch axes swapped; the shift of one lane broadcast to the points of another."""
    model = small_model(name)
    task = fitting_task(model, "regression")
    networks = [make_network(model, task, seed=s) for s in range(3)]
    x = torch.stack([(s + 1) * task.train.inputs[:3] + s for s in range(3)])  # as many points as lanes: a swap shows
    module = networks[0].module.train(training)
    parameters = {n: torch.stack([net.parameters[n] for net in networks]) for n in networks[0].parameters}
    buffers = {n: torch.stack([net.buffers[n] for net in networks]).clone() for n in networks[0].buffers}
    stacked = lane_forward(module, "native", parameters, buffers)(x, {})
    for i, network in enumerate(networks):
        own = {n: b.clone() for n, b in network.buffers.items()}
        alone = functional_call(network.module.train(training), {**network.parameters, **own}, (x[i],))
        torch.testing.assert_close(stacked[i], alone, rtol=1e-10, atol=1e-10)
        for n, b in own.items():
            torch.testing.assert_close(buffers[n][i], b, rtol=1e-10, atol=1e-10)
            assert torch.equal(b, network.buffers[n]) is not training, n


@every_case
def test_jacobians_are_those_of_autograd(name: str, kind: str) -> None:
    """Planted bugs: a missing transpose of a factor; padding or stride of a convolution forgotten; norm layers
    differentiated with batch statistics; the root multiplied from the other side; a tensor left out."""
    model = small_model(name)
    task = fitting_task(model, kind)
    network, x = make_network(model, task), task.test.inputs[:2]
    module = network.module.eval()

    def outputs(parameters: dict[str, Tensor]) -> Tensor:
        return functional_call(module, {**parameters, **network.buffers}, (x,))

    reference = {n: j.flatten(2) for n, j in jacrev(outputs)(network.parameters).items()}  # [B, K, P_t]
    jacobians = Jacobians(network)
    plain = jacobians(x)
    root = network.likelihood.curvature_root
    rooted = jacobians(x, root)
    torch.testing.assert_close(plain.outputs, network(x))
    assert list(plain.tensors) == list(network.parameters) == [n for n, _ in module.named_parameters()]
    values = root(plain.outputs)  # [B, K, C]
    largest = max(float(j.abs().max()) for j in reference.values())
    for n, j in reference.items():
        # Rounding of sums: next to the tensor's largest derivative, or (a bias before a norm) the network's.
        atol = 1e-9 * float(j.abs().max()) + 1e-12 * largest
        torch.testing.assert_close(plain.tensors[n].dense(), j, rtol=1e-8, atol=atol, msg=lambda m, n=n: f"{n}: {m}")
        expected = torch.einsum("bkc,bkp->bcp", values, j)
        torch.testing.assert_close(
            rooted.tensors[n].dense(), expected, rtol=1e-8, atol=atol, msg=lambda m, n=n: f"{n}: {m}"
        )
    deltas = torch.randn(
        2, sum(jacobians.sizes().values()), generator=torch.Generator().manual_seed(0), dtype=torch.float64
    )
    parts = deltas.split(list(jacobians.sizes().values()), dim=1)
    moved = sum(j.apply(d) for j, d in zip(plain.tensors.values(), parts, strict=True))
    expected = sum(torch.einsum("bkp,sp->bks", reference[n], d) for n, d in zip(reference, parts, strict=True))
    torch.testing.assert_close(moved, expected, rtol=1e-8, atol=1e-8)

    shape = len(x), task.spec.num_outputs, 2
    values = torch.randn(shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    pulled = torch.cat([torch.einsum("bkp,bks->sp", j, values) for j in reference.values()], dim=1)
    torch.testing.assert_close(plain.vjp(values), pulled, rtol=1e-8, atol=1e-9)
    torch.testing.assert_close(plain.jvp(deltas[0]), expected[..., 0], rtol=1e-8, atol=1e-8)

    last = last_layer_names(network, x)
    assert {n.rpartition(".")[2] for n in last} == {"weight", "bias"}
    some = Jacobians(network, last)(x)
    for n in last:
        torch.testing.assert_close(some.tensors[n].dense(), reference[n], rtol=1e-8, atol=1e-10)


def _negative_log_prob(likelihood: Likelihood, y: Tensor, outputs: Tensor) -> Tensor:
    return -likelihood.log_prob(outputs.unsqueeze(0), y.unsqueeze(0)).sum()


def test_curvature_roots_are_hessians() -> None:
    """Planted bugs: the softmax root of the wrong sign or rank; the noise of one output given to all."""
    for kind in KINDS:
        task = fitting_task(small_model("mlp"), kind)
        network = make_network(small_model("mlp"), task)
        outputs = 3 * network(task.test.inputs)
        root = network.likelihood.curvature_root(outputs)
        for b, (out, y) in enumerate(zip(outputs, task.test.targets, strict=True)):  # type: ignore[arg-type]
            loss = partial(_negative_log_prob, network.likelihood, y)
            hessian = jacrev(jacrev(loss))(out)
            torch.testing.assert_close(root[b] @ root[b].T, hessian, rtol=1e-9, atol=1e-12)
    # Outputs so sure that probabilities underflow must not give NaN.
    sure = network.likelihood.curvature_root(torch.tensor([[800.0, 0.0, -800.0]], dtype=torch.float64))
    assert bool(torch.isfinite(sure).all())
