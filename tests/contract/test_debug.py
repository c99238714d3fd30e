"""debug=fast shortens every method: what a method does many times is small there."""

from __future__ import annotations

from typing import Any

from bnn_runner.config.groups import Catalogue
from bnn_runner.config.overrides import parse
from bnn_runner.config.recommend import keys_of, resolve
from bnn_runner.experiment import build, load_experiment
from tests.choices import METHODS

MANY = 20
SIZES = {"keep", "rank", "features", "pivots", "num_weights", "sgd_batch_size"}
"""Settings that may be above MANY: sizes of what is kept or used at once, not lengths of a fit."""


def under_debug(catalogue: Catalogue, method: str, *typed: str) -> dict[str, Any]:
    """The method's settings under debug=fast, found without Hydra."""
    settled = resolve(catalogue, [parse(text) for text in (f"method={method}", "debug=fast", *typed)])
    settings = keys_of(catalogue, "method", settled.choices)
    for text in settled.additions:
        override = parse(text)
        group, _, key = override.key.partition(".")
        if group == "method" and key:
            assert key in settings, f"method={method}: the debug block has {key}, which is not one of its keys"
            settings[key] = override.value
    return settings


def test_no_method_is_long_under_debug_fast() -> None:
    """Planted bugs: a new method with a chain of its own and no debug block; a block that nobody reads, or of values
    that the method refuses."""
    catalogue, numbers = Catalogue(), 0
    for method in METHODS:
        settings = under_debug(catalogue, method)
        build(settings, where="method", what=f"method={method}")
        for key, value in settings.items():
            if isinstance(value, (int, float)) and not isinstance(value, bool):
                numbers += 1
                assert value <= MANY or key in SIZES, (
                    f"method={method}: {key}={value} under debug=fast. Give it a smaller value in the debug block of "
                    "the method's file, or name it in SIZES if it is no length."
                )
    assert numbers > 3 * len(METHODS) > 90


def test_the_debug_block_reaches_the_method_and_what_is_typed_wins() -> None:
    assert load_experiment(["method=hmc", "debug=fast"]).config["method"]["warmup"] == 10
    experiment = load_experiment(["method=hmc", "debug=fast", "method.warmup=33"])
    assert (experiment.method.warmup, experiment.method.draws) == (33, 10)  # type: ignore[attr-defined]
    assert "debug" not in experiment.config["method"]
    assert load_experiment(["method=hmc"]).method.warmup == 100  # type: ignore[attr-defined]
    assert under_debug(Catalogue(), "hmc", "method.warmup=33")["draws"] == 10
