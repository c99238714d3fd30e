"""Which weights the posterior is over: kinds held at MAP, and a network that is left as it came (float64)."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from bnn_runner.base import Model, Network
from bnn_runner.curvature.parameter_subset import kinds_of
from bnn_runner.errors import RunFailed, UserError
from bnn_runner.experiment import load_experiment
from bnn_runner.hyper.evidence import Evidence
from bnn_runner.hyper.fixed import Fixed
from bnn_runner.methods.laplace import Laplace
from bnn_runner.models.mlp import MLP
from bnn_runner.models.resnet18 import ResNet18
from bnn_runner.models.text_transformer import TextTransformer
from bnn_runner.models.vit import ViT
from bnn_runner.tasks import Task
from tests.problems import context, make_network, make_task


def of_kind(network: Network, kind: Any) -> set[str]:
    return {n for n in network.parameters if kind in kinds_of(network.module, n)}


def small_vit() -> tuple[Task, Network]:
    task = make_task("classification", (1, 4, 4), 3, num_train=12)
    return task, make_network(ViT(patch=2, width=4, depth=1, heads=2), task)


def test_the_kinds_of_a_transformers_weights() -> None:
    """Planted bugs: the owner's class alone (projections are linear layers); a norm's shift counted as a bias."""
    _, network = small_vit()
    block = "blocks.0.attention"
    assert of_kind(network, "attention") == {f"{block}.{m}.{k}" for m in ("qkv", "out") for k in ("weight", "bias")}
    embedded = {"token", "positions", "project.weight", "project.bias"}
    assert of_kind(network, "embedding") == {f"embedding.{n}" for n in embedded}
    norms = {"blocks.0.norm1", "blocks.0.norm2", "norm"}
    assert of_kind(network, "norm") == {f"{n}.{k}" for n in norms for k in ("weight", "bias")}
    others = ("blocks.0.fc1", "blocks.0.fc2", "out", "embedding.project", f"{block}.qkv", f"{block}.out")
    assert of_kind(network, "bias") == {f"{n}.bias" for n in others}
    assert kinds_of(network.module, "out.weight") == frozenset()

    task = make_task("classification", (4,), 2, num_train=6, vocabulary=9)
    text = make_network(TextTransformer(width=4, depth=1, heads=2), task)
    assert of_kind(text, "embedding") == {"embedding.weight", "positions.table"}


class TorchBlock(nn.Module):
    """Torch's own layers: packed projections, an instance norm, a token by name."""

    def __init__(self) -> None:
        super().__init__()
        self.attention, self.norm = nn.MultiheadAttention(4, 2), nn.InstanceNorm1d(4, affine=True)
        self.class_token, self.table = nn.Parameter(torch.zeros(4)), nn.EmbeddingBag(3, 4)


def test_the_kinds_of_torchs_own_layers_and_of_norms_by_name() -> None:
    module = TorchBlock()
    found = {n: set(kinds_of(module, n)) for n, _ in module.named_parameters()}
    assert found["attention.in_proj_weight"] == found["attention.out_proj.weight"] == {"attention"}
    assert found["attention.in_proj_bias"] == {"attention", "bias"}
    assert found["norm.weight"] == found["norm.bias"] == {"norm"}
    assert found["class_token"] == found["table.weight"] == {"embedding"}
    task = make_task("classification", (3, 8, 8), 2, num_train=2)
    frn = make_network(ResNet18(norm="filter_response", widths=(2, 2, 2, 2)), task)
    assert {n.rpartition(".")[2] for n in of_kind(frn, "norm")} == {"scale", "shift"}


@pytest.mark.parametrize("hold", [("norm",), ("bias",), ("embedding",), ("attention",), ("bias", "attention")])
def test_what_is_held_stays_and_the_rest_is_the_smaller_posterior(hold: Any) -> None:
    """The covariance is that of the rows and columns left. Planted bugs: held weights kept in the basis with a tiny
    variance; only the first kind held; held weights counted in the evidence."""
    task, network = small_vit()
    whole = Laplace(structure="full").fit(task, [network], context(Fixed()))
    part = Laplace(structure="full", hold=hold).fit(task, [network], context(Fixed()))
    held = set().union(*(of_kind(network, kind) for kind in hold))
    assert {n for n, rule in part.treatment.items() if "held at MAP (method.hold=" in rule} == held
    assert set(part.treatment) == set(network.parameters)
    assert part.report.facts["evidence_over"] == f"all weights but {' and '.join(hold)}"
    assert not any("hold" in note for note in part.report.notes)

    def precision(posterior: Any) -> Tensor:
        size = sum(posterior.jacobians.sizes().values())
        return torch.linalg.inv(posterior.gaussian.product(torch.eye(size, dtype=torch.float64)))

    keep = torch.cat([torch.full((p.numel(),), n not in held) for n, p in network.parameters.items()])
    torch.testing.assert_close(precision(part), precision(whole)[keep][:, keep], rtol=1e-6, atol=1e-7)
    assert part.report.facts["weights_in_basis"] == int(keep.sum())


def test_a_kind_that_is_not_there_is_told_and_nothing_left_is_refused() -> None:
    task = make_task("classification", (3,), 3, num_train=9)
    network = make_network(MLP(hidden=(4,)), task)
    posterior = Laplace(structure="kfac", hold=("attention",)).fit(task, [network], context(Fixed()))
    assert any("method.hold=attention" in note for note in posterior.report.notes)
    only_bias = replace(network, parameters={n: p for n, p in network.parameters.items() if n.endswith("bias")})
    with pytest.raises(RunFailed, match=r"method\.hold"):
        Laplace(hold=("bias",)).fit(task, [only_bias], context(Fixed()))


def test_a_kind_that_does_not_exist_is_refused_before_the_work() -> None:
    with pytest.raises(UserError, match=r"values from norm, bias, embedding, attention; got .*Did you mean norm"):
        load_experiment(["method=laplace", "method.hold=[norms]"])


# ------------------------------------------------------------------------------- left as it came

LEFT: list[tuple[Laplace, Model, tuple[int, ...]]] = [
    (Laplace(structure="full", mode="tangent"), MLP(hidden=(4,), norm="batch"), (3,)),
    (Laplace(structure="ekfac", hold=("norm",)), MLP(hidden=(4,), norm="batch"), (3,)),
    (Laplace(structure="kfac", weights="last_layer", predict="network"), MLP(hidden=(4,), norm="layer"), (3,)),
    (Laplace(structure="diag", curvature="mc_fisher"), ViT(patch=2, width=4, depth=1, heads=2), (1, 4, 4)),
]


def state_of(module: nn.Module) -> dict[str, Any]:
    """All that a fit could leave behind on a module."""
    hooks = {n: v for n, v in vars(nn.Module()).items() if n.endswith("hooks")}
    return {
        "tensors": {n: t.detach().clone() for n, t in module.state_dict().items()},
        "pointers": {n: t.data_ptr() for n, t in [*module.named_parameters(), *module.named_buffers()]},
        "flags": {n: (p.requires_grad, p.grad, p.dtype) for n, p in module.named_parameters()},
        "training": [m.training for m in module.modules()],
        "eps": [getattr(m, "eps", None) for m in module.modules()],
        "hooks": [{name: len(vars(m)[name]) for name in hooks} for m in module.modules()],
    }


@pytest.mark.parametrize(("method", "model", "shape"), LEFT, ids=["full tangent", "ekfac", "last layer", "diag of vit"])
def test_the_network_leaves_as_it_came(method: Laplace, model: Model, shape: tuple[int, ...]) -> None:
    """Planted bugs: a hook left behind; evaluation mode left on; gradients collected; batch statistics written to
    running ones; eps left at nothing; the generator moved."""
    task = make_task("classification", shape, 3, num_train=12)
    network = make_network(model, task)
    module = network.module.train()
    next(iter(module.parameters())).requires_grad_(False)
    next(m for m in module.modules() if m is not module).eval()
    before, weights = state_of(module), {n: t.clone() for n, t in network.tensors.items()}
    random, threads = torch.get_rng_state(), torch.get_num_threads()
    flags = torch.is_grad_enabled(), torch.get_default_dtype(), torch.backends.mha.get_fastpath_enabled()
    posterior = method.fit(task, [network], context(Evidence()))
    posterior.draws(3, 0)(task.test.inputs)
    if hasattr(posterior, "moments"):
        posterior.moments(task.test.inputs)
    after = state_of(module)
    assert all(torch.equal(after["tensors"].pop(n), t) for n, t in before.pop("tensors").items())
    assert after.pop("tensors") == {}
    assert after == before
    assert all(torch.equal(network.tensors[n], t) for n, t in weights.items())
    assert torch.equal(torch.get_rng_state(), random) and torch.get_num_threads() == threads
    assert flags == (torch.is_grad_enabled(), torch.get_default_dtype(), torch.backends.mha.get_fastpath_enabled())
