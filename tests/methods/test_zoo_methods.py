"""Every kind of method on the networks of `tests.zoo`: whole runs that end in a result or a refusal with its cure."""

from __future__ import annotations

import io
import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call

from bnn_runner.errors import UserError
from bnn_runner.experiment import load_experiment
from bnn_runner.methods.concrete_dropout import ConcreteNoise
from bnn_runner.methods.mc_dropout import DropoutNoise
from bnn_runner.models.likelihoods import NoiseRule
from bnn_runner.models.priors import Isotropic
from bnn_runner.posteriors.noisy_network import NoisePosterior
from bnn_runner.runner import run_together
from bnn_runner.runtime.console import Console
from bnn_runner.runtime.torch_state import evaluation_mode
from bnn_runner.training.engine import LaneTrainer
from bnn_runner.training.noise_layers import NOISE, noise_widths, noisy_layers
from bnn_runner.training.schedules import Schedule
from bnn_runner.training.state import Lane, TrainingConfig
from tests.choices import exhaustive_unless
from tests.models.test_zoo import Made, problem
from tests.problems import make_network, make_task
from tests.zoo import IMAGES, ZOO

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*weight_norm:FutureWarning"),
    pytest.mark.filterwarnings("ignore:The default value for `dim`"),
]
CHAINS = ["method.chains=2"]
METHODS: dict[str, list[str]] = {
    "map": [],
    "ensemble": ["method.size=2"],
    "laplace_full": [],
    "laplace_kfac": [],
    "laplace_block": [],
    "laplace_diag": [],
    "laplace_low_rank": [],
    "laplace_sampled": ["method.samples=4", "method.probes=2"],
    "laplace_functional": [],
    "laplace_subnetwork": ["method.num_weights=10"],
    "laplace_last_layer": [],
    "bbb": [],
    "bbb_flipout": [],
    "bbb_weights": [],
    "mc_dropout": ["method.rate=0.5"],
    "concrete_dropout": [],
    "swag": ["method.epochs=3"],
    "sgld": [*CHAINS, "method.length=8", "method.keep=16"],
    "hmc": [*CHAINS, "method.warmup=4", "method.draws=4", "method.max_leapfrogs=2"],
}
EVERY = {
    "always dropout": r"same outputs for the same inputs.*nn.Dropout",
    "plain list": r"plain list or mapping: layers\. Use nn.ModuleList",
    "spoiled inputs": r"not change its inputs in place.*Write x = x - 1",
    "no backward": r"differentiable in its parameters",
}
"""Networks that no method can use, and what is said."""
READ_ELSEWHERE = r"weight of layer a must be read by this layer alone.*Use method=bbb_weights"
SHARED = r"weight of every layer is a parameter of its own.*Use method=mc_dropout, or method=bbb_weights"
REFUSED = {
    ("tied weight", "mc_dropout"): READ_ELSEWHERE,
    ("borrowed weight", "mc_dropout"): READ_ELSEWHERE,
    ("closed gate", "mc_dropout"): READ_ELSEWHERE,
    ("branches", "mc_dropout"): r"Layer a must receive one row per point.*Use method=bbb_weights",
    ("tied weight", "concrete_dropout"): SHARED,
    ("borrowed weight", "concrete_dropout"): READ_ELSEWHERE,
    ("closed gate", "concrete_dropout"): READ_ELSEWHERE,
    ("branches", "concrete_dropout"): r"Layer a must receive one row per point.*Use method=bbb_weights",
    ("weight norm", "concrete_dropout"): SHARED,
    ("old weight norm", "concrete_dropout"): SHARED,
    ("spectral norm", "concrete_dropout"): SHARED,
    ("scalars", "laplace_last_layer"): r"ends in a linear layer.*Use method.weights=all",
    ("local constants", "hmc"): r"float64.*dtype=x.dtype.*method=sghmc",
}
PAIRS = [(name, method) for name in ZOO for method in METHODS]
QUICK = {
    "bbb": {"tied weight", "by keyword"},
    "swag": {"old weight norm", "scalars", "attention"},
    "laplace_sampled": {"scalars", "never called"},
    "hmc": {"constants"},
}


def by_default(name: str, method: str) -> bool:
    """One method on every network, and every refusal; further pairs that ended in a traceback once."""
    return (method == "map" and name != "lstm") or (name, method) in REFUSED or name in QUICK.get(method, ())


def words(folder: Path, name: str, method: str) -> list[str]:
    shape = (1, 5, 6) if name in IMAGES else (3,)
    random = np.random.default_rng(0)
    x = random.normal(size=(40, *shape)).astype("float32")
    flat = x.reshape(40, -1)
    y = np.stack([np.sin(flat[:, 0]), flat[:, 1] * flat[:, 2]], 1) + 0.1 * random.normal(size=(40, 2))
    np.savez(folder / "data.npz", x=x, y=y)
    data = ["data=arrays", f"data.path={folder}/data.npz", f"model._target_=tests.zoo.{ZOO[name].__qualname__}"]
    small = ["schedule=adam", "schedule.epochs=2", "schedule.batch_size=12", "prior=isotropic", "eval.num_draws=8"]
    quiet = ["metric=[marginal]", "figures=false", "save_posterior=true", "allow=[tests]"]
    return [*data, f"method={method}", *METHODS[method], *small, *quiet]


def outcome(folder: Path, name: str, method: str, *more: str) -> tuple[str, str]:
    """How a run of the network ends, and its reason if it fails or is refused."""
    try:
        [ended] = run_together([load_experiment([*words(folder, name, method), *more])], Console(io.StringIO()), False)
    except UserError as error:
        return "refused", str(error)
    return ended.status, ended.message


@pytest.mark.parametrize(("name", "method"), exhaustive_unless(by_default, PAIRS))
def test_a_network_has_a_result_or_a_refusal_that_names_the_cure(
    name: str, method: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Planted bugs: KeyError of a tied or normed weight; IndexError of a scalar; RuntimeError of an unused layer, of
    a recurrent one, of float32 constants under HMC; a traceback of any kind."""
    monkeypatch.chdir(tmp_path)
    status, message = outcome(tmp_path, name, method)
    expected = EVERY.get(name) or REFUSED.get((name, method))
    if expected is None:
        assert status == "done", message
    else:
        assert status in ("refused", "failed")
        assert re.search(expected, message, re.DOTALL), message


@pytest.mark.parametrize("method", ["map", "bbb", "swag", "mc_dropout"])
def test_dropout_of_the_networks_own_is_seeded_in_training(
    method: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Planted bugs: masks from the global generator (three scores under one cell); one mask for every step."""
    scores = []
    for run in range(2):
        (tmp_path / str(run)).mkdir()
        monkeypatch.chdir(tmp_path / str(run))
        torch.manual_seed(run)
        state = torch.get_rng_state()
        assert outcome(tmp_path / str(run), "own dropout", method)[0] == "done"
        assert torch.equal(state, torch.get_rng_state())
        [found] = (tmp_path / str(run)).glob("outputs/runs/*/*/*/*/metrics.csv")
        scores.append(found.read_text())
    assert scores[0] == scores[1]


def trainers(count: int, epochs: int = 2) -> LaneTrainer:
    task = make_task("regression", (3,), 2, num_train=20)
    schedule = Schedule(optimizer="adam", epochs=epochs, batch_size=10, lr=0.01)
    config = TrainingConfig(Made(ZOO["own dropout"]), schedule, Isotropic(1.0), NoiseRule(), dtype=torch.float64)
    return LaneTrainer(config, [Lane(task, seed) for seed in range(count)], torch.device("cpu"))


def test_random_layers_have_other_numbers_in_every_step_and_lane() -> None:
    """Planted bugs: the step left out of the stream; lanes of a stack that share the masks of the first."""
    assert trainers(2).strategy == "loop"
    trainer = trainers(1)
    x = torch.ones(1, 4, 3, dtype=torch.float64)
    with trainer.training_mode(), torch.no_grad():
        first, again = trainer._outputs(x, {}), trainer._outputs(x, {})
        trainer.state.step = 1
        later = trainer._outputs(x, {})
    assert torch.equal(first, again)
    assert not torch.equal(first, later)


def masked(layer: nn.Module, weight: Tensor, noise: Tensor) -> Tensor:
    """The weight whose columns are multiplied by the noise of the features that they meet."""
    if isinstance(layer, nn.Linear):
        return weight * noise
    if isinstance(layer, nn.ConvTranspose2d):
        return weight * noise[:, None, None, None]
    assert isinstance(layer, nn.Conv2d)
    groups = noise.view(layer.groups, 1, -1).expand(-1, weight.shape[0] // layer.groups, -1)
    return weight * groups.reshape(weight.shape[0], -1)[..., None, None]


COMPUTED = {"scaled when open", "weight norm", "old weight norm", "spectral norm"}
"""Networks whose layers act with another matrix than their weight: the noise is on that matrix."""
NOISY = ZOO.keys() - EVERY.keys() - COMPUTED - {n for n, m in REFUSED if m == "mc_dropout"} - {"local constants"}


@pytest.mark.parametrize("name", sorted(NOISY))
def test_a_mask_of_inputs_is_a_mask_of_weights(name: str) -> None:
    """A dropout draw is the network without noise at weights M ξ. Planted bugs: noise of one of two calls; noise of a
    layer that is read and not called; the input given by keyword left alone."""
    task, plain = problem(name)
    noise = DropoutNoise(0.5, "bernoulli", "all")
    network = make_network(Made(ZOO[name]), task, noise_transform=noise)
    row = noise.sample(1, list(noise_widths(network.module).values()), torch.Generator().manual_seed(3)).double()
    draws = NoisePosterior(network, noise).draws(1, 0)
    x = task.test.inputs
    names = noisy_layers(network.module, "all")
    assert all(f"{n}.{NOISE}" in network.buffers for n in names)
    weights: Mapping[str, Any] = network.parameters
    found = draws.__class__(network, row)(x)[0]
    parts = row[0].split(list(noise_widths(network.module).values()))
    changed = {
        f"{n}.weight": masked(network.module.get_submodule(n), weights[f"{n}.weight"], part)
        for n, part in zip(names, parts, strict=True)
    }
    with torch.no_grad(), evaluation_mode(network.module):
        expected = functional_call(network.module, network.tensors | changed, (x,))
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-11)
    assert plain.parameters.keys() == network.parameters.keys()


def test_the_entropy_of_masks_counts_the_channels_that_a_layer_receives() -> None:
    """Planted bug: F taken from the weight's second axis, which is F over the groups, or the outputs if transposed."""
    noise = ConcreteNoise(0.3, 0.1, "all")
    task = make_task("regression", (1, 5, 6), 2)
    module = Made(ZOO["grouped"]).build(task.spec)
    noise.apply(module)
    given = Isotropic(2.0).precisions(module)
    leaves = {n: p.detach().unsqueeze(0) for n, p in module.named_parameters()}
    found = float(noise.penalty(leaves, given, noise_widths(module)))
    entropy = -(0.3 * math.log(0.3) + 0.7 * math.log(0.7))
    energy = sum(float(leaves[f"{n}.weight"].square().sum()) / 0.7 for n in ("into", "grouped", "up", "out"))
    assert found == pytest.approx(energy - (1 + 4 + 4 + 2) * entropy, rel=1e-5)
