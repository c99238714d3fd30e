"""The contract of a model: shapes, functional calls, independence of points, lanes, Jacobians."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.func import functional_call, jacrev

from bnn_runner.base import Model, Network, model_problems
from bnn_runner.curvature.jacobians import Jacobians
from bnn_runner.curvature.parameter_subset import last_layer_names
from bnn_runner.tasks import Task, TaskSpec
from bnn_runner.testing.expect import require, require_equal, require_sentences
from bnn_runner.testing.problems import KINDS, SHAPES, fitting_task, make_network, unlike
from bnn_runner.training.lanes import lane_forward


def check_model(model: Model, kinds: Sequence[str] = KINDS, task: Task | None = None, jacobians: bool = True) -> None:
    """The whole contract of a model, on a small task of each kind.

    - Outputs are [B, K]; in evaluation mode a point's output depends on that point alone.
    - All weights are parameters (or buffers) that `functional_call` replaces, and all of them matter.
    - Initial weights come from the global generator, which the caller seeds.
    - A network with `stacks_lanes = True` treats stacked networks as separate ones, in both modes.
    - `problems` returns sentences.
    - With `jacobians`, derivatives of the structured forms are those of autograd (Laplace methods need them).

    Args:
        model: an instance, small enough for seconds.
        kinds: kinds of task, "regression" and "classification".
        task: a task of your own, in float64, where the model takes none of the small inputs of `SHAPES`.
        jacobians: leave out for a network that no Laplace method will see.

    Raises:
        AssertionError: saying which line of the contract does not hold.
    """
    name = type(model).__name__
    require(isinstance(model, Model), f"{name} must have the methods problems(spec) and build(spec).")
    if not dataclasses.is_dataclass(model):
        raise AssertionError(f"{name} must be a frozen dataclass whose fields are its YAML's keys.")
    for shape, vocabulary in SHAPES.items():
        spec = TaskSpec("random", "classification", shape, 3, 0.1, vocabulary)
        require_sentences(model_problems(model, spec), f"{name}.problems")
    for own in [task] if task is not None else [fitting_task(model, kind) for kind in kinds]:
        network = make_network(model, own)
        check_independent_points(network, own)
        check_functional_call(network, own)
        check_initial_weights(model, own)
        if getattr(network.module, "stacks_lanes", False):
            check_stacked_lanes(model, own, training=True)
            check_stacked_lanes(model, own, training=False)
        if jacobians:
            check_jacobians(network, own)


def check_independent_points(network: Network, task: Task) -> None:
    """In evaluation mode an output depends on its own point, and not on the rest of the batch."""
    x = task.test.inputs
    assert isinstance(x, Tensor)
    whole = network(x)
    shape = (len(x), task.spec.num_outputs)
    require(whole.shape == shape, f"Outputs must be [B, K] = {list(shape)}; got {list(whole.shape)}.")
    message = "In evaluation mode a point's output must not depend on the other points of the batch."
    require_equal(torch.cat([network(point) for point in x.split(1)]), whole, message)
    require_equal(network(torch.cat([unlike(x), x]).flip(0))[: len(x)].flip(0), whole, message)
    require_equal(network(x), whole, "Outputs in evaluation mode must not change from call to call.", tolerance=0)
    require(float((whole[0] - whole[1]).abs().max()) > 1e-7, "Outputs must depend on the inputs; two points agree.")


def check_functional_call(network: Network, task: Task) -> None:
    """`functional_call` replaces every weight, and every parameter has a gradient."""
    x = task.test.inputs
    assert isinstance(x, Tensor)
    module = network.module.eval()
    own = {n: p.detach().clone() for n, p in module.named_parameters()}
    at_own = module(x)
    result = functional_call(module, network.tensors, (x,))
    require(
        float((result - at_own).detach().abs().max()) > 1e-6,
        "Outputs must follow the weights given to functional_call: read self.weight in forward, and cache nothing.",
    )
    untouched = all(torch.equal(p, own[n]) for n, p in module.named_parameters())
    require(untouched, "A forward pass must not change the module's parameters.")
    with torch.no_grad():
        for n, p in module.named_parameters():
            p.copy_(network.parameters[n])
    require_equal(module(x), result, "All weights must be parameters or buffers of the module.", tolerance=1e-7)
    grads = torch.autograd.grad(module(x).square().sum(), list(module.parameters()), allow_unused=True)
    unused = [n for (n, _), g in zip(module.named_parameters(), grads, strict=True) if g is None]
    require(not unused, f"Every parameter must enter the output; these do not: {', '.join(unused)}.")


def check_initial_weights(model: Model, task: Task) -> None:
    """The same seed of the global generator gives the same weights, another seed others."""
    weights = []
    for seed in (0, 0, 1):
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            weights.append(torch.cat([p.detach().flatten() for p in model.build(task.spec).parameters()]))
    message = "Initial weights must come from torch's global generator, which the caller seeds"
    require(torch.equal(weights[0], weights[1]), f"{message}; two builds with the same seed differ.")
    require(not torch.equal(weights[0], weights[2]), f"{message}; builds with two seeds are equal.")


def check_stacked_lanes(model: Model, task: Task, training: bool) -> None:
    """Parameters [L, ...] and inputs [L, B, ...] give the outputs and running statistics of L separate networks."""
    networks = [make_network(model, task, seed=s) for s in range(3)]
    inputs = task.train.inputs
    assert isinstance(inputs, Tensor)
    x = torch.stack([(s + 1) * inputs[:3] + s for s in range(3)])  # as many points as lanes: a swap shows
    module = networks[0].module.train(training)
    parameters = {n: torch.stack([net.parameters[n] for net in networks]) for n in networks[0].parameters}
    buffers = {n: torch.stack([net.buffers[n] for net in networks]).clone() for n in networks[0].buffers}
    stacked = lane_forward(module, "native", parameters, buffers)(x, {})
    mode = "training" if training else "evaluation"
    for i, network in enumerate(networks):
        own = {n: b.clone() for n, b in network.buffers.items()}
        alone = functional_call(network.module.train(training), {**network.parameters, **own}, (x[i],))
        message = f"Networks stacked on a leading axis must be separate ones in {mode} mode"
        require_equal(stacked[i], alone, f"{message}; outputs of lane {i} differ.", tolerance=1e-10)
        for n, b in own.items():
            require_equal(buffers[n][i], b, f"{message}; buffer {n} of lane {i} differs.", tolerance=1e-10)
            moved = not torch.equal(b, network.buffers[n])
            require(moved is training, f"Buffer {n} must change in training mode and only there; mode: {mode}.")


def check_jacobians(network: Network, task: Task) -> None:
    """Jacobians, their products and those of the last layer are what `torch.func.jacrev` gives."""
    x = task.test.inputs
    assert isinstance(x, Tensor)
    x, module = x[:2], network.module.eval()

    def outputs(parameters: dict[str, Tensor]) -> Tensor:
        return functional_call(module, {**parameters, **network.buffers}, (x,))

    reference = {n: j.flatten(2) for n, j in jacrev(outputs)(network.parameters).items()}  # [B, K, P_t]
    structured = Jacobians(network)
    root = network.likelihood.curvature_root
    plain, rooted = structured(x), structured(x, root)
    require_equal(plain.outputs, network(x), "Outputs next to Jacobians must be those of the network.", 1e-7)
    names = [n for n, _ in module.named_parameters()]
    require(list(plain.tensors) == names, f"Jacobians must cover every parameter tensor; got {list(plain.tensors)}.")
    values = root(plain.outputs)  # [B, K, C]
    largest = max(float(j.abs().max()) for j in reference.values())

    def close(result: Tensor, expected: Tensor, atol: float, what: str) -> None:
        torch.testing.assert_close(
            result, expected, rtol=1e-8, atol=atol, msg=lambda details: f"{what} must be that of autograd.\n{details}"
        )

    for n, j in reference.items():
        # Rounding of sums: next to the tensor's largest derivative, or (a bias before a norm) the network's.
        atol = 1e-9 * float(j.abs().max()) + 1e-12 * largest
        close(plain.tensors[n].dense(), j, atol, f"The Jacobian of {n}")
        expected = torch.einsum("bkc,bkp->bcp", values, j)
        close(rooted.tensors[n].dense(), expected, atol, f"The Jacobian of {n}, multiplied by the curvature's root,")
    sizes = list(structured.sizes().values())
    deltas = torch.randn(2, sum(sizes), generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    for k, delta in enumerate(deltas):
        parts = zip(reference.values(), delta.split(sizes), strict=True)
        expected = torch.stack([torch.einsum("bkp,p->bk", j, d) for j, d in parts]).sum(0)
        close(plain.jvp(delta), expected, 1e-8, f"The product J v of direction {k}")
    shape = len(x), task.spec.num_outputs, 2
    values = torch.randn(shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    expected = torch.cat([torch.einsum("bkp,bks->sp", j, values) for j in reference.values()], dim=1)
    close(plain.vjp(values), expected, 1e-9, "The product Jᵀ u")
    last = last_layer_names(network, x)
    require(
        {n.rpartition(".")[2] for n in last} <= {"weight", "bias"} and bool(last),
        f"The last layer must be a linear map with a weight (and a bias); got {list(last)}.",
    )
    some = Jacobians(network, last)(x)
    for n in last:
        close(some.tensors[n].dense(), reference[n], 1e-10, f"The Jacobian of {n}, alone,")
