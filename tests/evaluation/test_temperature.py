"""Calibration by one temperature. Each test names the bug that it is meant to catch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from bnn_runner.base import ClosedForm, Posterior
from bnn_runner.errors import UserError
from bnn_runner.evaluation.evaluate import evaluate
from bnn_runner.evaluation.io import load, save
from bnn_runner.evaluation.temperature import fit_temperature
from bnn_runner.models.likelihoods import Categorical
from bnn_runner.rng import generator
from bnn_runner.tasks import Split, Task
from tests.choices import fitted
from tests.problems import make_task


@dataclass(frozen=True)
class LogitDraws:
    """f_s(x) = factor × x[:, s·K:(s+1)·K]: the inputs are the logits of every draw, one after the other."""

    first: int
    last: int
    weights: tuple[float, ...]
    factor: float
    likelihood: Categorical = field(default_factory=Categorical)
    floats_per_draw: int = 1

    @property
    def log_weights(self) -> Tensor:
        return torch.tensor(self.weights[self.first : self.last]).log()

    def __len__(self) -> int:
        return self.last - self.first

    def __getitem__(self, part: slice) -> LogitDraws:
        a, b, _ = part.indices(len(self))
        return replace(self, first=self.first + a, last=self.first + b)

    def __call__(self, x: Tensor) -> Tensor:
        return torch.stack([self.factor * x[:, 3 * s : 3 * s + 3] for s in range(self.first, self.last)])


@dataclass(frozen=True)
class Logits:
    weights: tuple[float, ...] = (1.0,)
    factor: float = 1.0
    finite: bool = True
    report: Mapping[str, Any] = field(default_factory=dict)
    treatment: Mapping[str, str] = field(default_factory=dict)
    likelihood: Categorical = field(default_factory=Categorical)

    def draws(self, num_draws: int, seed: int) -> LogitDraws:
        return LogitDraws(0, len(self.weights), self.weights, self.factor)


def task_of_mixture(weights: tuple[float, ...], num_val: int = 8000) -> Task:
    """Labels drawn from Σ_s w_s softmax(logits_s): the posterior with these logits is calibrated at T = 1."""
    g = generator(0, "calibration test")

    def split(n: int) -> Split:
        x = 2 * torch.randn(n, 3 * len(weights), generator=g, dtype=torch.float64)
        probs = sum(w * torch.softmax(x[:, 3 * s : 3 * s + 3], -1) for s, w in enumerate(weights))
        assert isinstance(probs, Tensor)
        return Split(x, torch.multinomial(probs, 1, generator=g).squeeze(-1), torch.arange(n))

    task = make_task("classification", (3 * len(weights),), 3)
    return replace(task, val=split(num_val), test=split(40), ood={})


@pytest.mark.parametrize("factor", [0.5, 1.0, 2.0])
@pytest.mark.parametrize("weights", [(1.0,), (0.8, 0.2)])
def test_a_known_miscalibration_is_found(weights: tuple[float, ...], factor: float) -> None:
    """Logits doubled want T = 2. Planted bugs: T inverted; logits of the averaged probabilities; weights of draws
    ignored; the mean over draws of their log-likelihoods."""
    task = task_of_mixture(weights)
    found = fit_temperature(task, Logits(weights, factor), "draws", 1, 0, 512)
    assert found.temperature == pytest.approx(factor, rel=0.06)  # four standard errors at 8,000 points
    assert found.after >= found.before and found.points == 8000
    exact = fit_temperature(task, Logits(weights), "draws", 1, 0, 512)
    assert found.temperature / exact.temperature == pytest.approx(factor, rel=3e-4), "exact but for the search"


def test_a_temperature_divides_the_logits_of_every_draw_in_every_score(tmp_path: Path) -> None:
    """Scores at T are those of a posterior whose logits are divided by T. Planted bugs: only the marginal; only
    validation; mean probabilities left as they were; the temperature lost on disk."""
    weights = (0.8, 0.2)
    task = task_of_mixture(weights, 30)
    hot = evaluate(task, Logits(weights, 3.0), "draws", 1, 0, 7, 10, temperature=3.0)
    plain = evaluate(task, Logits(weights, 1.0), "draws", 1, 0, 7, 10)
    assert hot.temperature == 3.0 and plain.temperature is None
    for name in ("test", "val"):
        for key in ("loglik", "mean_probs", "mean_entropy"):
            torch.testing.assert_close(getattr(hot.splits[name], key), getattr(plain.splits[name], key))
    save(hot, tmp_path)
    assert load(tmp_path).temperature == 3.0


@pytest.mark.parametrize(
    "method", ["laplace_closed_form", "laplace", "mc_dropout", "ensemble", "sgld", "hmc", "bbb", "swag"]
)
def test_every_predictive_gains_on_the_validation_part(method: str) -> None:
    """Planted bugs: a closed form scored without its temperature; draws other than those that are scored;
    weights of draws left out (SGLD's step decays)."""
    case = fitted(method, "mlp", "classification")
    task, made, posterior = case.task, case.method, case.posterior
    task = replace(task, val=task.test)
    found = fit_temperature(task, posterior, made.predictive, 20, 5, 4)
    for temperature, value in ((None, found.before), (found.temperature, found.after)):
        made_at = evaluate(task, posterior, made.predictive, 20, 5, 3, 10, temperature=temperature)
        loglik = made_at.splits["val"].loglik
        assert loglik is not None
        mixture = (loglik + torch.log_softmax(made_at.log_weights, 0).unsqueeze(-1)).logsumexp(0)
        assert float(mixture.mean()) == pytest.approx(value, abs=1e-9)
    assert found.after > found.before and f"{found.temperature:.4g}" in found.note()
    assert isinstance(posterior, ClosedForm) or made.predictive == "draws"


def test_what_cannot_be_calibrated_is_refused() -> None:
    """Planted bugs: a regression with divided means; a temperature fitted to no point."""
    posterior: Posterior = Logits()
    with pytest.raises(UserError, match=r"is a regression.*eval\.calibrate=none"):
        fit_temperature(make_task("regression", (3,), 1), posterior, "draws", 1, 0, 5)
    task = make_task("classification", (3,), 3)
    with pytest.raises(UserError, match=r"data\.val_fraction=0\.1"):
        fit_temperature(replace(task, spec=replace(task.spec, val_fraction=0.0)), posterior, "draws", 1, 0, 5)
