"""Evidence and predictive covariances against laplace-torch, float64, same weights and prior (1e-5 relative)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import nn
from torch.func import functional_call
from torch.utils.data import DataLoader, TensorDataset

from bnn_runner.base import Network
from bnn_runner.hyper.evidence import Evidence
from bnn_runner.hyper.fixed import Fixed
from bnn_runner.methods.laplace import Laplace
from bnn_runner.methods.laplace_subnetwork import LaplaceSubnetwork
from bnn_runner.models.likelihoods import Gaussian
from bnn_runner.models.mlp import MLP
from bnn_runner.tasks import Task, TaskSpec
from tests.laplace.test_identities import dense_curvature, places
from tests.problems import context, make_network, make_task

laplace = pytest.importorskip("laplace", reason="the peer is a test dependency: pip install -e '.[test]'")
CurvlinopsGGN = pytest.importorskip("laplace.curvature").CurvlinopsGGN


class SmallCNN(nn.Module):
    def __init__(self, num_outputs: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(1, 3, 3, padding=1)
        self.conv2 = nn.Conv2d(3, 4, 3, stride=2)
        self.out = nn.Linear(4 * 3 * 3, num_outputs)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.tanh(self.conv2(torch.tanh(self.conv1(x))))
        return self.out(x.flatten(1))


@dataclass(frozen=True)
class CNN:
    def problems(self, spec: TaskSpec) -> list[str]:
        return []

    def build(self, spec: TaskSpec) -> nn.Module:
        return SmallCNN(spec.num_outputs)


class _Sequential(nn.Module):
    """Our network with its weights put in, as a plain module for the peer."""

    def __init__(self, network: Network, cnn: bool) -> None:
        super().__init__()
        if cnn:
            inner: nn.Module = SmallCNN(network.parameters["out.bias"].shape[0]).double()
            inner.load_state_dict(network.parameters)
            self.layers = nn.Sequential(inner.conv1, nn.Tanh(), inner.conv2, nn.Tanh(), nn.Flatten(), inner.out)
        else:
            layers: list[nn.Module] = []
            for i in range(2):
                w = network.parameters[f"hidden.{i}.weight"]
                layers += [_linear(w, network.parameters[f"hidden.{i}.bias"]), nn.Tanh()]
            layers.append(_linear(network.parameters["out.weight"], network.parameters["out.bias"]))
            self.layers = nn.Sequential(*layers)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x)


def _linear(weight: torch.Tensor, bias: torch.Tensor) -> nn.Linear:
    layer = nn.Linear(weight.shape[1], weight.shape[0]).double()
    layer.load_state_dict({"weight": weight, "bias": bias})
    return layer


CASES = {
    "mlp regression": ("regression", (3,), 1, False),
    "mlp classes": ("classification", (3,), 3, False),
    "cnn classes": ("classification", (1, 8, 8), 3, True),
}
STRUCTURES = {
    "full": (Laplace(structure="full"), "all", "full"),
    "kfac": (Laplace(structure="kfac"), "all", "kron"),
    "diag": (Laplace(structure="diag"), "all", "diag"),
    "last_layer": (Laplace(structure="full", weights="last_layer"), "last_layer", "full"),
}


def _setup(case: str) -> tuple[Task, Network, nn.Module]:
    kind, shape, outputs, cnn = CASES[case]
    task = make_task(kind, shape, outputs, num_train=30)
    network = make_network(CNN() if cnn else MLP(hidden=(6, 5)), task)
    peer_net = _Sequential(network, cnn)
    x = task.test.inputs
    ours = network(x)
    torch.testing.assert_close(peer_net(x).detach(), ours)
    return task, network, peer_net


def _peer(task: Task, network: Network, peer_net: nn.Module, subset: str, structure: str, precision: float):
    kind = task.spec.kind
    noise = float(network.likelihood.log_noise.exp()) if isinstance(network.likelihood, Gaussian) else 1.0
    la = laplace.Laplace(
        peer_net,
        kind,
        subset_of_weights=subset,
        hessian_structure=structure,
        prior_precision=precision,
        sigma_noise=noise,
        backend=CurvlinopsGGN,
    )
    la.fit(DataLoader(TensorDataset(task.train.inputs, task.train.targets), batch_size=len(task.train)))
    return la


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("structure", STRUCTURES)
def test_evidence_and_covariance_agree(case: str, structure: str) -> None:
    """Planted bugs this catches: a missing transpose in a factor, KFAC scaled by N twice, bias blocks joined."""
    method, subset, peer_structure = STRUCTURES[structure]
    task, network, peer_net = _setup(case)
    precision = 0.7
    peer = _peer(task, network, peer_net, subset, peer_structure, precision)
    posterior = method.fit(task, [network], context(Fixed(precision)))

    shift = len(task.train) * float(task.target_scale.log().sum())  # ours is in original target units
    peer_evidence = float(peer.log_marginal_likelihood()) - shift
    if task.spec.kind == "regression" and posterior.report.facts["evidence_over"] == "all weights":
        assert posterior.report.facts["train_loglik_nats"] == pytest.approx(
            float(peer.log_likelihood) - shift, rel=1e-5
        )
    assert posterior.report.facts["evidence_nats"] == pytest.approx(peer_evidence, rel=1e-5)

    x = task.test.inputs
    moments = posterior.moments(x)
    mean, covariance = peer._glm_predictive_distribution(x)
    torch.testing.assert_close(moments.mean, mean.detach(), rtol=1e-5, atol=1e-9)
    torch.testing.assert_close(
        moments.covariance, covariance.detach().reshape(moments.covariance.shape), rtol=1e-5, atol=1e-9
    )


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("structure", ["full", "kfac"])
def test_the_evidence_optimum_agrees(structure: str) -> None:
    """The precision that the peer's gradient ascent approaches has no larger evidence than ours has."""
    method, subset, peer_structure = STRUCTURES[structure]
    task, network, peer_net = _setup("mlp classes")
    posterior = method.fit(task, [network], context(Evidence()))
    assert posterior.report.facts["hyper_status"] == "converged"
    ours = posterior.report.facts["prior_precision"]
    peer = _peer(task, network, peer_net, subset, peer_structure, ours)
    at_optimum = float(peer.log_marginal_likelihood(prior_precision=torch.tensor(ours, dtype=torch.float64)))
    for factor in (0.9, 1.1):
        assert (
            float(peer.log_marginal_likelihood(prior_precision=torch.tensor(ours * factor, dtype=torch.float64)))
            < at_optimum
        )
    assert posterior.report.facts["evidence_nats"] == pytest.approx(at_optimum, rel=1e-5)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("structure", ["full", "diag"])
@pytest.mark.parametrize("case", CASES)
def test_subnetworks_agree(case: str, structure: Any) -> None:
    """The same weights chosen, then as above. Planted bugs: another order of tensors; the penalty of all weights."""
    task, network, peer_net = _setup(case)
    posterior = LaplaceSubnetwork(num_weights=20, structure=structure).fit(task, [network], context())
    peer = _subnetwork_peer(task, network, peer_net, structure)
    assert torch.equal(peer.backend.subnetwork_indices.sort().values, places(network, posterior.jacobians))
    shift = len(task.train) * float(task.target_scale.log().sum())
    evidence = float(peer.log_marginal_likelihood()) - shift
    assert posterior.report.facts["evidence_nats"] == pytest.approx(evidence, rel=1e-5)
    moments = posterior.moments(task.test.inputs)
    _, covariance = peer._glm_predictive_distribution(task.test.inputs)
    expected = covariance.detach().reshape(moments.covariance.shape)
    torch.testing.assert_close(moments.covariance, expected, rtol=1e-5, atol=1e-9)


def _subnetwork_peer(task: Task, network: Network, peer_net: nn.Module, structure: str) -> Any:
    """The peer over the 20 weights that it finds to have the largest variance under its own diagonal Laplace."""
    noise = float(network.likelihood.log_noise.exp()) if isinstance(network.likelihood, Gaussian) else 1.0
    settings = {"prior_precision": 0.7, "sigma_noise": noise, "backend": CurvlinopsGGN}
    loader = DataLoader(TensorDataset(task.train.inputs, task.train.targets), batch_size=len(task.train))
    diagonal = laplace.DiagLaplace(peer_net, task.spec.kind, **settings)
    index = laplace.utils.subnetmask.LargestVarianceDiagLaplaceSubnetMask(peer_net, 20, diagonal).select(loader)
    kind = {"full": laplace.subnetlaplace.FullSubnetLaplace, "diag": laplace.subnetlaplace.DiagSubnetLaplace}[structure]
    peer = kind(peer_net, task.spec.kind, subnetwork_indices=index, **settings)
    peer.fit(loader)
    return peer


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("case", CASES)
def test_low_rank_agrees_given_the_eigenpairs(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Evidence and covariance by the peer's Woodbury forms. The peer finds its eigenpairs, which are those of the
    Hessian and no GGN, by a package that no registry has; so it is given those of the dense curvature by numpy."""
    task, network, peer_net = _setup(case)
    posterior = Laplace(structure="low_rank", rank=9).fit(task, [network], context(Fixed(0.7)))
    monkeypatch.setattr("laplace.baselaplace.find_spec", lambda _: True)
    noise = float(network.likelihood.log_noise.exp()) if isinstance(network.likelihood, Gaussian) else 1.0
    settings = {"prior_precision": 0.7, "sigma_noise": noise, "backend": CurvlinopsGGN}
    reference = laplace.DiagLaplace(peer_net, task.spec.kind, **settings)
    reference.fit(DataLoader(TensorDataset(task.train.inputs, task.train.targets), batch_size=len(task.train)))
    peer = laplace.LowRankLaplace(peer_net, task.spec.kind, **settings)
    values, vectors = torch.linalg.eigh(dense_curvature(task, network) * noise**2)
    peer.H = (vectors[:, -9:], values[-9:])
    for name in ("mean", "n_data", "loss", "n_outputs"):
        setattr(peer, name, getattr(reference, name))
    evidence = float(peer.log_marginal_likelihood()) - len(task.train) * float(task.target_scale.log().sum())
    assert posterior.report.facts["evidence_nats"] == pytest.approx(evidence, rel=1e-5)
    moments = posterior.moments(task.test.inputs)
    _, covariance = peer._glm_predictive_distribution(task.test.inputs)
    expected = covariance.detach().reshape(moments.covariance.shape)
    torch.testing.assert_close(moments.covariance, expected, rtol=1e-5, atol=1e-9)


def test_functional_call_reference() -> None:
    """The peer's network is the same function: guards the comparison itself."""
    task, network, peer_net = _setup("cnn classes")
    out = functional_call(network.module.eval(), network.tensors, (task.train.inputs,))
    torch.testing.assert_close(peer_net(task.train.inputs).detach(), out.detach())
