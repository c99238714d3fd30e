"""What must hold for the draws of every method with every class of model, found by globbing conf/.

Plain `pytest` takes one YAML of each method's class with every model and every YAML with one model; the others are
marked `exhaustive`. The checks are those of `bnn_runner.testing`, which an outside package calls as well;
`tests/testing` plants bugs in front of them.
"""

from __future__ import annotations

import itertools

import pytest

from bnn_runner.testing import methods as contract
from tests.choices import (
    METHODS,
    MODELS,
    PLAIN_MODEL,
    SLOW_MODELS,
    by_default,
    exhaustive_unless,
    fitted,
    kinds,
    one_of_each,
    small_method,
    target,
    too_large,
)

DRAWN = one_of_each(MODELS)
PAIRS = [pair for pair in itertools.product(METHODS, DRAWN) if not too_large(*pair)]
KINDS = {model: kinds(model) for model in DRAWN}
CASES = [(method, model, kind) for method, model in PAIRS for kind in KINDS[model]]


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
    assert {(method, model) for model, some in SLOW_MODELS.items() for method in some} <= default
    for model in set(DRAWN) - set(SLOW_MODELS):
        mixtures = {"EnsembleLaplace"} if ("ensemble_laplace", model) in left_out else set()
        assert {target("method", method) for method, paired in default if paired == model} == classes - mixtures


@pytest.mark.parametrize(
    ("method", "model", "kind"), exhaustive_unless(lambda method, model, kind: by_default(method, model), CASES)
)
def test_the_contract_of_a_method_holds(method: str, model: str, kind: str) -> None:
    """Planted bugs: fresh noise in each call; noise that depends on the batch; batchnorm left in training mode; a
    slice that begins again at draw 0, or without its noise; one generator for all draws; a seed that is not used;
    eval() without putting flags back; running statistics that move; weights copied into the module;
    requires_grad_(False) on it; a hook left behind; torch.manual_seed, set_default_dtype or set_grad_enabled in fit,
    draws, moments or evaluate; draws from the global generator; evaluation with draws and points transposed."""
    case = fitted(method, model, kind)
    contract.check_frozen_draws(case)
    contract.check_nested_slices(case)
    contract.check_seed(case)
    contract.check_treatment(case)
    contract.check_no_traces(case)
