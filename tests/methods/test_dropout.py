"""Dropout's noise in training and in draws. Each test names the bug that it is meant to catch."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from bnn_runner.base import Model, Network, NoiseTransform, TrainingSpec
from bnn_runner.errors import Interrupted, RunFailed, UserError
from bnn_runner.methods.concrete_dropout import ConcreteDropout, ConcreteNoise
from bnn_runner.methods.mc_dropout import DropoutNoise, MCDropout
from bnn_runner.models.likelihoods import Gaussian, NoiseRule
from bnn_runner.models.mlp import MLP
from bnn_runner.models.priors import Isotropic
from bnn_runner.tasks import TaskSpec
from bnn_runner.training.engine import LaneTrainer
from bnn_runner.training.noise_layers import noise_widths
from bnn_runner.training.schedules import Schedule
from bnn_runner.training.state import Lane, TrainingConfig
from tests.problems import context, make_network, make_task

CPU = torch.device("cpu")
SCHEDULE = Schedule("adam", epochs=3, batch_size=16, lr=0.02)


class TinyConvNetwork(nn.Module):
    def __init__(self, num_outputs: int) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(2, 3, 3), nn.Conv2d(3, 4, 3)
        self.norm = nn.BatchNorm2d(4)
        self.out = nn.Linear(4 * 4, num_outputs)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(torch.tanh(self.norm(self.second(torch.tanh(self.first(x))))).flatten(1))


@dataclass(frozen=True)
class TinyConv:
    def problems(self, spec: TaskSpec) -> list[str]:
        return []

    def build(self, spec: TaskSpec) -> nn.Module:
        return TinyConvNetwork(spec.num_outputs)


MODELS: dict[str, tuple[Model, tuple[int, ...], str]] = {
    "native": (MLP(hidden=(6, 5), activation="relu", norm="batch"), (3,), "native"),
    "vmap": (TinyConv(), (2, 6, 6), "vmap"),
}


def training_config(model: Model, noise_transform: NoiseTransform | None, **changes: Any) -> TrainingConfig:
    settings = {"prior": Isotropic(2.0), "noise": NoiseRule(), "dtype": torch.float64, "stack": "always"} | changes
    return TrainingConfig(model, SCHEDULE, noise_transform=noise_transform, **settings)


def train(r: TrainingConfig, lanes: list[Lane]) -> list[Network]:
    return LaneTrainer(r, lanes, CPU).train(None, lambda *_: None)


def same(a: Network, b: Network, **tolerance: float) -> None:
    for name, value in a.parameters.items():
        if tolerance:
            torch.testing.assert_close(value, b.parameters[name], **tolerance, msg=lambda m, name=name: f"{name}: {m}")
        else:
            assert torch.equal(value, b.parameters[name]), name
    assert isinstance(a.likelihood, Gaussian) and isinstance(b.likelihood, Gaussian)
    torch.testing.assert_close(a.likelihood.log_noise, b.likelihood.log_noise, rtol=1e-8, atol=1e-9)


@pytest.mark.parametrize("lanes", [1, 3])
@pytest.mark.parametrize("name", MODELS)
def test_without_noise_the_training_is_that_of_map(name: str, lanes: int) -> None:
    """Planted bugs: a prior term or a scaling that stays at rate 0; another stream of initial weights or orders."""
    model, shape, _ = MODELS[name]
    task = make_task("regression", shape, 2, num_train=37)
    members = [Lane(task, 5 + i) for i in range(lanes)]
    plain = train(training_config(model, None), members)
    for a, b in zip(train(training_config(model, DropoutNoise(0.0, "bernoulli", "all")), members), plain, strict=True):
        same(a, b)
        assert [row["loss"] for row in a.history] == [row["loss"] for row in b.history]


@pytest.mark.parametrize(
    "noise",
    [DropoutNoise(0.3, "bernoulli", "all"), DropoutNoise(0.3, "gaussian", "all"), ConcreteNoise(0.2, 0.3, "all")],
    ids=["bernoulli", "gaussian", "concrete"],
)
@pytest.mark.parametrize("name", MODELS)
def test_a_lane_under_dropout_is_the_lane_alone(name: str, noise: NoiseTransform) -> None:
    """Planted bugs: one mask for all lanes; masks that depend on the number of lanes; one mask a batch, not a point;
    a learned rate shared by lanes, or broadcast along points."""
    model, shape, strategy = MODELS[name]
    first, other = (make_task("regression", shape, 2, num_train=37, seed=s) for s in (0, 1))
    lanes = [Lane(first, 11), Lane(first, 12), Lane(other, 12)]
    r = training_config(model, noise)
    group = LaneTrainer(r, lanes, CPU)
    assert group.strategy == strategy
    together = group.train(None, lambda *_: None)
    for i, lane in enumerate(lanes):
        same(together[i], train(r, [lane])[0], rtol=1e-7, atol=1e-8)
    plain = train(training_config(model, None), lanes[:1])[0]
    assert not torch.allclose(together[0].parameters["out.weight"], plain.parameters["out.weight"], atol=1e-3)
    stream = group._noise
    assert stream is not None
    mask = stream.at(0, 13)["out.noise"]
    assert mask.shape[:2] == (3, 13)
    assert not torch.equal(mask[0], mask[1]) and not torch.equal(mask[:, 0], mask[:, 1]), "lanes and points apart"


def test_a_resumed_training_has_the_noise_of_an_uninterrupted_one(tmp_path: Path) -> None:
    """Planted bugs: a stream that begins again when resumed; noise of the block's first step for all its steps."""
    task = make_task("regression", (3,), 1, num_train=37)
    r = training_config(MLP(hidden=(6,)), DropoutNoise((0.2, 0.4), "bernoulli", "all"))
    lanes, whole = [Lane(task, 3), Lane(task, 4)], []
    whole = train(r, lanes)
    done: list[int] = []
    with pytest.raises(Interrupted):
        LaneTrainer(r, lanes, CPU).train(tmp_path / "c", lambda s, d, t: done.append(d), lambda: len(done) == 4)
    for a, b in zip(LaneTrainer(r, lanes, CPU).train(tmp_path / "c", lambda *_: None), whole, strict=True):
        same(a, b)
    noise = LaneTrainer(r, lanes, CPU)._noise
    assert noise is not None and noise.steps > 1
    assert not torch.equal(noise.at(0, 12)["out.noise"], noise.at(1, 12)["out.noise"])


@pytest.mark.parametrize("kind", ["bernoulli", "gaussian"])
def test_moments_over_masks_of_a_linear_network(kind: Any) -> None:
    """f = Σ w_i ξ_i x_i + b has mean wᵀx + b and variance p/(1−p) Σ (w_i x_i)². Planted bugs: masks not divided by
    the keep probability; rate and keep probability exchanged; a mask of its own for each point (covariance of two
    points lost); sd in place of variance."""
    task, rate, count = make_task("regression", (4,), 1), 0.2, 4_000
    method = MCDropout(rate=rate, kind=kind)
    network = make_network(MLP(hidden=()), task, noise_transform=method.noise_transform)
    posterior = method.fit(task, [network], context())
    x = task.test.inputs[:2]
    outputs = posterior.draws(count, 1)(x).squeeze(-1)
    parts = network.parameters["out.weight"] * x  # [2, 4]
    mean, variance = network(x).squeeze(-1), rate / (1 - rate) * (parts @ parts.T)
    centred = outputs - mean
    assert float((centred.mean(0) / (variance.diagonal() / count).sqrt()).abs().max()) < 5
    products = centred.unsqueeze(-1) * centred.unsqueeze(-2)  # [S, 2, 2]
    error = products.std(0) / math.sqrt(count)
    assert float(((products.mean(0) - variance) / error).abs().max()) < 5
    torch.testing.assert_close(posterior.centre(x).squeeze(-1), mean)


@pytest.mark.parametrize("kind", ["bernoulli", "gaussian"])
def test_the_prior_term_is_its_expectation_over_masks(kind: Any) -> None:
    """E ½λ|M ξ|² = ½ λ|M|²/(1−p). Planted bugs: times the keep probability; the bias too; the wrong layer's rate."""
    noise = DropoutNoise((0.1, 0.5), kind, "all")
    module = MLP(hidden=(6,)).build(make_task("regression", (3,), 1).spec)
    noise.apply(module)
    given = Isotropic(3.0).precisions(module)
    found = noise.precisions(module, given)
    samples = noise.sample(200_000, [3, 6], torch.Generator().manual_seed(0)).double()
    weights = {n: p.detach().double() for n, p in module.named_parameters()}
    for name, columns in (("hidden.0", samples[:, :3]), ("out", samples[:, 3:])):
        energy = 1.5 * (columns.square() @ weights[f"{name}.weight"].square().sum(0))
        stated = found[f"{name}.weight"] / 2 * float(weights[f"{name}.weight"].square().sum())
        assert abs(float(energy.mean()) - stated) < 5 * float(energy.std()) / math.sqrt(len(samples))
        assert found[f"{name}.bias"] == 3.0


def test_the_penalty_of_learned_rates_and_their_masks() -> None:
    """½ λ|M|²/(1−p) − F H(p) a layer, and masks of mean 1 and variance p/(1−p) as the temperature goes to 0. Planted
    bugs: the keep probability on the wrong side; the entropy of outputs, not of inputs; a rate taken for its logit."""
    noise = ConcreteNoise(0.3, 0.01, "all")
    module = MLP(hidden=(5,)).build(make_task("regression", (3,), 1).spec).double()
    noise.apply(module)
    given = Isotropic(2.0).precisions(module)
    stacked = {n: torch.stack([p.detach(), 2 * p.detach()]) for n, p in module.named_parameters()}
    penalty = noise.penalty(stacked, given, noise_widths(module))
    for i in (0, 1):
        expected = 0.0
        for layer, width in (("hidden.0", 3), ("out", 5)):
            p = 1 / (1 + math.exp(-float(stacked[f"{layer}.rate_logit"][i])))
            energy = float(stacked[f"{layer}.weight"][i].square().sum())
            entropy = -(p * math.log(p) + (1 - p) * math.log(1 - p))
            expected += 0.5 * 2.0 * energy / (1 - p) - width * entropy
        assert float(penalty[i]) == pytest.approx(expected, rel=1e-6)
    found = noise.precisions(module, given)
    assert {n for n, v in found.items() if v == 0} == {
        f"{layer}.{kind}" for layer in ("hidden.0", "out") for kind in ("weight", "rate_logit")
    }
    count = 20_000
    u = noise.sample(count, [3], torch.Generator().manual_seed(1)).double()
    masks = noise._relaxed(module.get_submodule("hidden.0"), torch.ones(count, 3, dtype=torch.float64), u).detach()
    assert float(((masks.mean(0) - 1) / masks.std(0)).abs().max()) < 5 / math.sqrt(count)
    assert float((masks.var(0) / (0.3 / 0.7) - 1).abs().max()) < 0.05


@pytest.mark.parametrize("lanes", [1, 2])
def test_a_step_under_learned_rates_follows_the_gradient_of_the_whole_objective(lanes: int) -> None:
    """One step of SGD from the objective by autograd, its quadratic part too. Planted bugs: that part not divided by N;
    the factor of another lane, or of another layer; a rate without the slope of the energy."""
    task = make_task("classification", (3,), 3, num_train=12)
    noise = ConcreteNoise(0.3, 0.1, "all")
    schedule = Schedule("sgd", epochs=1, batch_size=12, lr=0.5, shape="constant", momentum=0.0)
    r = replace(training_config(MLP(hidden=(6, 5)), noise, prior=Isotropic(40.0)), schedule=schedule)
    group = LaneTrainer(r, [Lane(task, seed) for seed in range(lanes)], CPU)
    names = list(group.state.parameters)
    for i in range(lanes):  # rates of their own
        for k, name in enumerate(n for n in names if n.endswith("rate_logit")):
            group.state.parameters[name].detach()[i] = -1.0 + 0.4 * k + 0.7 * i
    before = [group.network(i).parameters for i in range(lanes)]
    given = Isotropic(40.0).precisions(group.module)
    with group.training_mode():
        group.advance()
    buffers = group._noise.at(0, 12)  # type: ignore[union-attr]
    for i in range(lanes):
        w = {n: p.clone().requires_grad_() for n, p in before[i].items()}
        order = group._epoch(0)[0][i]
        x, y = task.train.gather(order)
        outputs = torch.func.functional_call(group.module, w | {n: b[i] for n, b in buffers.items()}, (x,))
        objective = nn.functional.cross_entropy(outputs, y)
        for layer in ("hidden.0", "hidden.1", "out"):
            p = torch.sigmoid(w[f"{layer}.rate_logit"])
            weight = w[f"{layer}.weight"]
            entropy = -(p * p.log() + (1 - p) * (1 - p).log())
            penalty = 20.0 * weight.square().sum() / (1 - p) - weight.shape[1] * entropy
            objective = objective + (penalty + given[f"{layer}.bias"] / 2 * w[f"{layer}.bias"].square().sum()) / 12
        slopes = torch.autograd.grad(objective, list(w.values()))
        after = group.network(i).parameters
        for (n, old), slope in zip(before[i].items(), slopes, strict=True):
            torch.testing.assert_close(after[n], old - 0.5 * slope, rtol=1e-10, atol=1e-12)


def test_learned_rates_are_told_and_follow_prior_and_data() -> None:
    """Under vast noise and a weak prior the entropy alone rules, and rates grow to one half; a network that must fit
    data to a small noise lowers them. Planted bugs: the penalty's sign; the penalty not divided by N."""
    task = make_task("regression", (3,), 1, num_train=64)
    schedule = Schedule("adam", epochs=60, batch_size=64, lr=0.05, shape="constant")
    r = TrainingConfig(
        MLP(hidden=(8,)),
        schedule,
        Isotropic(1e-6),
        NoiseRule("fixed", 0.05),
        noise_transform=ConcreteNoise(0.2, 0.1, "all"),
    )
    rates = {}
    for name, strong in (("data", r), ("entropy", replace(r, noise=NoiseRule("fixed", 1e4)))):
        network = LaneTrainer(strong, [Lane(task.to(CPU, torch.float32), 1)], CPU).train(None, lambda *_: None)[0]
        posterior = ConcreteDropout(0.2).fit(task.to(CPU, torch.float32), [network], context())
        rates[name] = posterior.report.facts["rates"]
        assert f"out {rates[name]['out']:.3g}" in posterior.report.notes[0]
    assert max(rates["data"].values()) < 0.2 < 0.45 < min(rates["entropy"].values())


def test_learned_rates_that_leave_no_noise_are_told() -> None:
    """Planted bug: the advice to train longer, which lowers them further."""
    task = make_task("regression", (3,), 1)
    noise = ConcreteDropout().noise_transform
    network = make_network(MLP(hidden=(4,)), task, noise_transform=noise)
    still = {n: torch.full_like(p, -40.0) if n.endswith("rate_logit") else p for n, p in network.parameters.items()}
    with pytest.raises(RunFailed, match=r"learned rates are hidden\.0 4\.25e-18, out 4\.25e-18: .* fewer epochs"):
        ConcreteDropout().fit(task, [replace(network, parameters=still)], context())


def test_rates_that_few_draws_show_are_a_posterior() -> None:
    """Planted bug: sixteen draws looked at, among which none differs at a rate of one in two thousand: a run that
    learned one was called the same function everywhere."""
    task = make_task("regression", (3,), 1)
    method = MCDropout(rate=5e-4)
    posterior = method.fit(
        task, [make_network(MLP(hidden=(4,)), task, noise_transform=method.noise_transform)], context()
    )
    outputs = posterior.draws(1024, 0)(task.train.gather(torch.arange(4))[0])
    changed = int((outputs != outputs[:1]).any(-1).any(-1).sum())
    assert not bool((outputs[:16] != outputs[:1]).any()) and 0 < changed < 30


def test_what_cannot_be_a_posterior_is_refused() -> None:
    """Planted bugs: rate 0 taken for dropout; a network without a place for noise; masks that never drop anything."""
    for rate in (0.0, 1.0, -0.1, (0.0, 0.0)):
        with pytest.raises(UserError, match=r"method\.rate"):
            MCDropout(rate=rate)
    task = make_task("regression", (3,), 1)
    with pytest.raises(UserError, match=r"no layer for the noise.* method\.where=all"):
        make_network(MLP(hidden=()), task, noise_transform=MCDropout(where="hidden").noise_transform)
    with pytest.raises(UserError, match=r"2 layers with noise \(hidden\.0, out\)"):
        make_network(MLP(hidden=(4,)), task, noise_transform=MCDropout(rate=(0.1,)).noise_transform)
    method = MCDropout(rate=1e-9)
    with pytest.raises(RunFailed, match="all draws of this posterior are the same function"):
        method.fit(task, [make_network(MLP(hidden=(4,)), task, noise_transform=method.noise_transform)], context())
    assert "val_fraction" in MCDropout(noise="validation").problems(TaskSpec("d", "regression", (3,), 1, 0.0), None)[0]
    assert MCDropout(noise="validation").problems(TaskSpec("d", "classification", (3,), 2, 0.1), None)


def test_places_of_the_noise() -> None:
    """Planted bugs: the only channel of an image dropped by default; noise for each pixel, not for each channel."""
    spec = TaskSpec("d", "classification", (2, 6, 6), 3, 0.1)
    for where, names in (
        ("auto", ["second", "out"]),
        ("all", ["first", "second", "out"]),
        ("hidden", ["second", "out"]),
    ):
        module = TinyConv().build(spec)
        DropoutNoise(0.1, "bernoulli", where).apply(module)  # type: ignore[arg-type]
        assert [n.rpartition(".")[0] for n, _ in module.named_buffers() if n.endswith(".noise")] == names
    module.second.noise = torch.tensor([[2.0, 0.0, 1.0]])
    seen: list[Tensor] = []
    module.second.register_forward_pre_hook(lambda m, inputs: seen.append(inputs[0]))
    x = torch.randn(5, 2, 6, 6)
    module.eval()(x)
    h = torch.tanh(module.first(x))
    torch.testing.assert_close(seen[0], h * torch.tensor([2.0, 0.0, 1.0]).reshape(1, 3, 1, 1))


def test_the_rework_joins_the_key() -> None:
    """Planted bug: a network trained at another rate taken from the cache."""
    specs = [TrainingSpec(0)] + [
        MCDropout(**changes).needs()[0]
        for changes in ({}, {"rate": 0.1}, {"kind": "gaussian"}, {"where": "hidden"})  # type: ignore[arg-type]
    ]
    assert len({spec.identity for spec in specs}) == len(specs)
    assert MCDropout(noise="validation").needs() == MCDropout().needs()


def test_noise_is_chosen_on_the_validation_part() -> None:
    """The best multiple of the grid by the marginal log-likelihood. Planted bugs: the smallest; the joint one."""
    task = make_task("regression", (3,), 1)
    method = MCDropout(rate=0.3, noise="validation", noise_multiples=(0.5, 1.0, 2.0, 4.0, 8.0, 16.0))
    network = make_network(MLP(hidden=(5,)), task, noise=0.2, noise_transform=method.noise_transform)
    posterior = method.fit(task, [network], context())
    draws = posterior.draws(200, context().seed)
    assert task.val.targets is not None
    outputs, scores = draws(task.val.inputs), {}
    for m in method.noise_multiples:
        likelihood = Gaussian(torch.tensor([0.2 * m], dtype=torch.float64).log())
        scores[m] = float((likelihood.log_prob(outputs, task.val.targets).logsumexp(0) - math.log(200)).mean())
    assert posterior.report.facts["noise_multiple"] == max(scores, key=lambda m: scores[m]) not in (0.5, 16.0)
    assert isinstance(posterior.likelihood, Gaussian)
    assert float(posterior.likelihood.log_noise.exp()) == pytest.approx(0.2 * posterior.report.facts["noise_multiple"])
