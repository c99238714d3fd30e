"""A fixed noise that float32 can hold next to the targets, and advice that names it where something diverged."""

from __future__ import annotations

import math

import pytest
import torch

from bnn_runner.errors import RunFailed, UserError
from bnn_runner.mcmc.chains import _check_finite
from bnn_runner.models.likelihoods import LEAST_NOISE, NoiseRule, noise_advice


@pytest.mark.parametrize("sigma", [0.0, -1.0, math.inf, math.nan])
def test_a_noise_that_is_no_standard_deviation_is_refused(sigma: float) -> None:
    with pytest.raises(UserError, match=r"likelihood\.sigma must be positive and finite"):
        NoiseRule("fixed", sigma)


@pytest.mark.parametrize("sigma", [1e-310, 1e-20, 1e-12, 0.9 * LEAST_NOISE * 50, 1.1 * 3 / LEAST_NOISE, 1e30])
def test_a_noise_that_is_lost_next_to_the_targets_is_refused(sigma: float) -> None:
    """By the smallest of the targets' scales. Planted bug: a bound that forgets the units of the targets."""
    scales = torch.tensor([3.0, 50.0])
    with pytest.raises(UserError, match=r"likelihood\.sigma must be at (least|most)") as refused:
        NoiseRule("fixed", sigma).fixed_log_noise(scales)
    assert "float32" in str(refused.value) and "likelihood.noise=learned" in str(refused.value)


@pytest.mark.parametrize("sigma", [1e-5, 0.1, 1.0, 1e6])
def test_other_noise_is_its_logarithm_in_standardised_units(sigma: float) -> None:
    scales = torch.tensor([3.0, 50.0])
    torch.testing.assert_close(NoiseRule("fixed", sigma).fixed_log_noise(scales), (sigma / scales).log())


def test_the_noise_is_named_before_the_step_where_it_is_the_cause() -> None:
    assert noise_advice(None) == "" and noise_advice(torch.tensor([-2.0])) == ""
    advice = noise_advice(torch.tensor([0.0, math.log(1e-5)]))
    assert "1e-05 of the targets' standard deviation" in advice and "likelihood.sigma" in advice
    with pytest.raises(RunFailed) as failed:
        _check_finite(torch.tensor([[1.0], [math.nan]]), 0, 10, 0.1, advice)
    text = str(failed.value)
    assert text.index("likelihood.sigma") < text.index("method.step")
