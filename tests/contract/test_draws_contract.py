"""What must hold for the draws of every method with every class of model, found by globbing conf/.

Plain `pytest` takes one YAML of each method's class with every model and every YAML with one model; the others are
marked `exhaustive`.

Each docstring names the bug that the test catches; each was planted once by hand and seen to fail.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor

from bnn_runner.base import ClosedForm, Network
from bnn_runner.evaluation.evaluate import evaluate
from tests.choices import (
    METHODS,
    MODELS,
    PLAIN_MODEL,
    by_default,
    exhaustive_unless,
    fitted,
    kinds,
    one_of_each,
    small_method,
    target,
    too_large,
    unlike,
)
from tests.problems import context

DRAWN = one_of_each(MODELS)
PAIRS = [pair for pair in itertools.product(METHODS, DRAWN) if not too_large(*pair)]
KINDS = {model: kinds(model) for model in DRAWN}
CASES = [(method, model, kind) for method, model in PAIRS for kind in KINDS[model]]
every_case = pytest.mark.parametrize(
    ("method", "model", "kind"), exhaustive_unless(lambda method, model, kind: by_default(method, model), CASES)
)
SEED, SIZE = 3, 5


def close(a: Tensor, b: Tensor) -> None:
    assert a.dtype == b.dtype == torch.float64
    torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-9)


def test_every_method_with_every_model_is_tested() -> None:
    """Planted bug: a glob that finds one folder too few, so that hardly anything is tested."""
    assert {"map", "ensemble", "laplace"} <= set(METHODS) and len(METHODS) >= 9
    assert {"mlp", "mlp_batchnorm", "lenet", "resnet20", "resnet18", "vit"} <= set(DRAWN) and len(DRAWN) >= 12
    assert {target("model", m) for m in DRAWN} == {target("model", m) for m in MODELS}
    left_out = set(itertools.product(METHODS, DRAWN)) - set(PAIRS)
    large = ("lenet", "resnet20", "torchvision", "wrn16_4")
    assert left_out == {("laplace_block", m) for m in large[:2]} | {("ensemble_laplace", m) for m in large}
    assert {case[:2] for case in CASES} == set(PAIRS)
    assert len(set(CASES)) == sum(len(KINDS[model]) for _, model in PAIRS)
    assert len({type(small_method(m)) for m in METHODS}) >= 3
    default = {pair for pair in PAIRS if by_default(*pair)}
    assert {method for method, model in default if model == PLAIN_MODEL} == set(METHODS)
    classes = {target("method", m) for m in METHODS}
    for model in DRAWN:
        mixtures = {"EnsembleLaplace"} if ("ensemble_laplace", model) in left_out else set()
        assert {target("method", method) for method, paired in default if paired == model} == classes - mixtures


@cache
def outputs(method: str, model: str, kind: str) -> Tensor:
    """[S, B, K] of the first draws at the test points, all in one call."""
    task, _, _, posterior = fitted(method, model, kind)
    return posterior.draws(SIZE, SEED)(task.test.inputs)


@every_case
def test_draws_are_the_same_functions_however_data_are_cut(method: str, model: str, kind: str) -> None:
    """Planted bugs: fresh noise in each call; noise that depends on the batch; batchnorm left in training mode."""
    task, _, _, posterior = fitted(method, model, kind)
    draws, x, whole = posterior.draws(SIZE, SEED), task.test.inputs, outputs(method, model, kind)
    size = len(draws)
    assert posterior.finite or size == SIZE
    assert whole.shape == (size, len(x), task.spec.num_outputs)
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(1))
    pieces = x[order].split([1, len(x) - 1])
    close(torch.cat([draws(piece) for piece in pieces], dim=1), whole[:, order])
    crowd = torch.cat([unlike(task.train.inputs[:1]), x[2:3], x[2:3]])
    close(draws(crowd)[:, 1:], whole[:, [2, 2]])
    if not posterior.finite:
        assert float(whole.std(0).min()) > 0, "draws that do not differ are no posterior"


@every_case
def test_slices_are_nested(method: str, model: str, kind: str) -> None:
    """Planted bugs: a slice that begins again at draw 0; one generator for all draws; a slice without its noise."""
    task, _, _, posterior = fitted(method, model, kind)
    draws, x, y = posterior.draws(SIZE, SEED), task.test.inputs[:2], task.test.targets
    assert y is not None
    y = y[:2]
    whole, size = outputs(method, model, kind)[:, :2], len(draws)
    loglik = draws.likelihood.log_prob(whole, y)
    assert loglik.shape == (size, len(x)) and draws.log_weights.shape == (size,)
    for a, b in {(0, 1), (size // 2, size), (size - 1, size + 3)}:
        part = draws[a:b]
        assert len(part) == min(b, size) - a
        result = part(x)
        close(result, whole[a:b])
        close(part.likelihood.log_prob(result, y), loglik[a:b])
        assert torch.equal(part.log_weights, draws.log_weights[a:b])
    if size > 3:
        close(draws[1:][1:3](x), whole[2:4])
    more = posterior.draws(SIZE + 2, SEED)
    close(more(x)[:size], whole)
    if not posterior.finite:
        assert len(more) == SIZE + 2
        close(posterior.draws(2, SEED)(x), whole[:2])


@every_case
def test_another_seed_gives_other_draws(method: str, model: str, kind: str) -> None:
    """Planted bug: a seed that is not used. That the same seed reproduces is seen by every other test here."""
    task, _, made, posterior = fitted(method, model, kind)
    whole = outputs(method, model, kind)
    other = posterior.draws(SIZE, SEED + 1)(task.test.inputs)
    assert made.finite is posterior.finite
    if posterior.finite:
        close(other, whole)
    else:
        assert float((other - whole).abs().amax((1, 2)).min()) > 1e-6, "every draw differs"


def _state(networks: list[Network]) -> dict[str, Any]:
    """All that a fit or an evaluation must leave as found."""
    seen: dict[str, Any] = {
        "rng": torch.get_rng_state().tolist(),
        "default dtype": torch.get_default_dtype(),
        "grad mode": torch.is_grad_enabled(),
        "threads": torch.get_num_threads(),
        "tf32": (torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32),
    }
    for i, network in enumerate(networks):
        module = network.module
        seen[f"flags {i}"] = {n: m.training for n, m in module.named_modules()}
        seen[f"hooks {i}"] = {
            n: (len(m._forward_hooks), len(m._forward_pre_hooks), len(m._backward_hooks))
            for n, m in module.named_modules()
        }
        held = {"own": {**dict(module.named_parameters()), **dict(module.named_buffers())}, "trained": network.tensors}
        for whose, tensors in held.items():
            for n, t in tensors.items():
                seen[f"{whose} {i} {n}"] = (t.data_ptr(), t.requires_grad, t.grad is None, t.detach().clone())
    return seen


def _same(before: dict[str, Any], after: dict[str, Any], where: str) -> None:
    assert before.keys() == after.keys()
    for name, value in before.items():
        if isinstance(value, tuple) and isinstance(value[-1], Tensor):
            assert value[:-1] == after[name][:-1], f"{name} after {where}"
            assert torch.equal(value[-1], after[name][-1]), f"{name} after {where}"
        else:
            assert value == after[name], f"{name} after {where}"


@every_case
def test_nothing_is_left_changed(method: str, model: str, kind: str) -> None:
    """Planted bugs: eval() without putting flags back; running statistics that move; weights copied into the
    module; requires_grad_(False) on it; a hook left behind; torch.manual_seed, set_default_dtype or
    set_grad_enabled in fit, draws, moments or evaluate; draws from the global generator (no reproduction);
    evaluation with draws and points transposed, or other draws for the second split."""
    task, networks, made, _ = fitted(method, model, kind)
    for network in networks:
        for i, part in enumerate(network.module.modules()):
            part.training = i % 2 == 0
        with torch.no_grad():  # the module's own weights are nobody's business
            for i, p in enumerate(network.module.parameters()):
                p.add_(1e-3).requires_grad_(i > 0)
    assert torch.get_default_dtype() == torch.float32 and torch.is_grad_enabled(), "an earlier fit changed them"
    torch.manual_seed(12345)  # fitted() ran under another state of the global generator
    before = _state(networks)

    def step(name: str, work: Callable[[], Any]) -> Any:
        result = work()
        _same(before, _state(networks), name)
        return result

    posterior = step("fit", lambda: made.fit(task, networks, context()))
    draws = step("draws", lambda: posterior.draws(SIZE, SEED))
    close(step("draws(x)", lambda: draws(task.test.inputs)), outputs(method, model, kind))
    if isinstance(posterior, ClosedForm):
        step("moments", lambda: posterior.moments(task.test.inputs))
        step("joint_covariance", lambda: posterior.joint_covariance(task.test))
    evaluation = step(
        "evaluate",
        lambda: evaluate(task, posterior, made.predictive, num_draws=SIZE, seed=SEED, batch_size=3, max_ood=1),
    )
    assert evaluation.splits.keys() == {"test", "val", "ood/other"}
    for name, split in (("test", task.test), ("val", task.val)):
        loglik = evaluation.splits[name].loglik
        assert loglik is not None and bool(torch.isfinite(loglik).all())
        if made.predictive == "draws":
            whole = outputs(method, model, kind) if name == "test" else draws(split.inputs)
            close(loglik, draws.likelihood.log_prob(whole, split.targets) - task.target_scale.log().sum())
