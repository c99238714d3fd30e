"""What must hold for the draws of every method with every model, found by globbing conf/.

Each docstring names the bug that the test catches; each was planted once by hand and seen to fail.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from bnn_runner.base import ClosedForm, Network, Task
from bnn_runner.evaluation import evaluate
from tests.contract.choices import KINDS, METHODS, MODELS, fitted, small_method, small_model
from tests.numerics.helpers import context

PAIRS = list(itertools.product(METHODS, MODELS))
CASES = [(method, model, kind) for method, model in PAIRS for kind in KINDS]
every_case = pytest.mark.parametrize(("method", "model", "kind"), CASES)
SEED, SIZE = 3, 5


def close(a: Tensor, b: Tensor) -> None:
    assert a.dtype == b.dtype == torch.float64
    torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-9)


def test_every_method_with_every_model_is_tested() -> None:
    """Planted bug: a glob that finds one folder too few, so that hardly anything is tested."""
    assert {"map", "ensemble", "laplace"} <= set(METHODS) and len(METHODS) >= 9
    assert {"mlp", "lenet", "resnet20"} <= set(MODELS) and len(MODELS) >= 7
    assert len(set(CASES)) == len(METHODS) * len(MODELS) * len(KINDS)
    assert len({type(small_model(m)) for m in MODELS}) >= 3 and len({type(small_method(m)) for m in METHODS}) >= 3


@every_case
def test_draws_are_the_same_functions_however_data_are_cut(method: str, model: str, kind: str) -> None:
    """Planted bugs: fresh noise in each call; noise that depends on the batch; batchnorm left in training mode."""
    task, _, _, posterior = fitted(method, model, kind)
    draws, x = posterior.draws(SIZE, SEED), task.test.inputs
    size = len(draws)
    assert posterior.finite or size == SIZE
    whole = draws(x)
    assert whole.shape == (size, len(x), task.spec.num_outputs)
    close(draws(x), whole)
    close(posterior.draws(SIZE, SEED)(x), whole)
    close(torch.cat([draws(part) for part in x.split(3)], dim=1), whole)
    close(torch.cat([draws(part) for part in x.split(1)], dim=1), whole)
    order = torch.tensor([4, 2, 6, 0, 5, 1, 3])
    close(draws(x[order]), whole[:, order])
    crowd = torch.cat([100 * task.train.inputs[:4], x[2:4], x[2:3]])
    close(draws(crowd)[:, 4:], whole[:, [2, 3, 2]])
    if not posterior.finite:
        assert float(whole.std(0).min()) > 0, "draws that do not differ are no posterior"


@every_case
def test_slices_are_nested(method: str, model: str, kind: str) -> None:
    """Planted bugs: a slice that begins again at draw 0; one generator for all draws; a slice that forgets its noise."""
    task, _, _, posterior = fitted(method, model, kind)
    draws, x, y = posterior.draws(SIZE, SEED), task.test.inputs, task.test.targets
    assert y is not None
    whole, size = draws(x), len(draws)
    loglik = draws.likelihood.log_prob(whole, y)
    assert loglik.shape == (size, len(x)) and draws.log_weights.shape == (size,)
    for a, b in ((0, size), (0, 1), (1, 3), (size - 1, size), (2, 2 + size)):
        part = draws[a:b]
        b = min(b, size)
        assert len(part) == max(0, b - a)
        if len(part) == 0:
            continue
        close(part(x), whole[a:b])
        close(part.likelihood.log_prob(part(x), y), loglik[a:b])
        assert torch.equal(part.log_weights, draws.log_weights[a:b])
    if size > 3:
        close(draws[1:][1:3](x), whole[2:4])
    more = posterior.draws(SIZE + 4, SEED)
    close(more(x)[:size], whole)
    if not posterior.finite:
        assert len(more) == SIZE + 4
        close(posterior.draws(2, SEED)(x), whole[:2])


@every_case
def test_seeds_reproduce_and_differ(method: str, model: str, kind: str) -> None:
    """Planted bugs: noise from the global generator (no reproduction); a seed that is not used (no difference)."""
    task, networks, made, posterior = fitted(method, model, kind)
    x = task.test.inputs
    whole = posterior.draws(SIZE, SEED)(x)
    with torch.random.fork_rng():
        torch.manual_seed(12345)
        again = small_method(method).fit(task, networks, context())
        close(again.draws(SIZE, SEED)(x), whole)
    other = posterior.draws(SIZE, SEED + 1)(x)
    if posterior.finite:
        close(other, whole)
    else:
        assert float((other - whole).abs().amax((1, 2)).min()) > 1e-6, "another seed gives other draws, every one of them"
        assert made.finite is False


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
        seen[f"hooks {i}"] = {n: (len(m._forward_hooks), len(m._forward_pre_hooks), len(m._backward_hooks)) for n, m in module.named_modules()}
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
    set_grad_enabled in fit, draws, moments or evaluate."""
    task, networks, made, _ = fitted(method, model, kind)
    for network in networks:
        for i, part in enumerate(network.module.modules()):
            part.training = i % 2 == 0
        first = next(iter(network.module.parameters()))
        first.requires_grad_(False)
    before = _state(networks)

    def step(name: str, work: Callable[[], Any]) -> Any:
        result = work()
        _same(before, _state(networks), name)
        return result

    posterior = step("fit", lambda: made.fit(task, networks, context()))
    draws = step("draws", lambda: posterior.draws(SIZE, SEED))
    step("draws(x)", lambda: draws(task.test.inputs))
    step("draws[1:2](x)", lambda: draws[1:2](task.test.inputs))
    if isinstance(posterior, ClosedForm):
        step("moments", lambda: posterior.moments(task.test.inputs))
        step("joint_covariance", lambda: posterior.joint_covariance(task.test))
    evaluation = step("evaluate", lambda: _evaluate(task, posterior, made))
    assert evaluation.test.loglik is not None
    assert bool(torch.isfinite(evaluation.test.loglik).all())


def _evaluate(task: Task, posterior: Any, method: Any) -> Any:
    return evaluate(task, posterior, method.predictive, num_draws=4, seed=0, batch_size=3, max_ood=4)


@every_case
def test_evaluation_scores_the_draws_as_they_are(method: str, model: str, kind: str) -> None:
    """Planted bugs: the batch size of evaluation changes the scores; draws and points transposed; other draws on
    the second split."""
    task, _, made, posterior = fitted(method, model, kind)
    once = _evaluate(task, posterior, made)
    other = evaluate(task, posterior, made.predictive, num_draws=4, seed=0, batch_size=100, max_ood=4)
    assert once.splits.keys() == other.splits.keys() == {"test", "val", "ood/other"}
    for name in ("test", "val"):
        close(once.splits[name].loglik, other.splits[name].loglik)  # type: ignore[arg-type]
    if made.predictive != "draws":
        return
    draws = posterior.draws(4, 0)
    for name, split in (("test", task.test), ("val", task.val)):
        expected = draws.likelihood.log_prob(draws(split.inputs), split.targets) - task.target_scale.log().sum()
        close(once.splits[name].loglik, expected)  # type: ignore[arg-type]
