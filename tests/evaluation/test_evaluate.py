"""Evaluation: draws and closed forms of linear models, whose every number is known, and the store."""

import json
import math
from dataclasses import dataclass, replace

import pytest
import torch

from bnn_runner.base import Moments
from bnn_runner.errors import RunFailed, UserError
from bnn_runner.evaluation import evaluate as module
from bnn_runner.evaluation import exact_gaussian
from bnn_runner.evaluation.closed_form import bridge_log_probs, gaussian_log_prob, probit_log_probs, variances
from bnn_runner.evaluation.evaluate import evaluate, evaluate_split
from bnn_runner.evaluation.io import FACTS, TENSORS, DamagedEvaluation, load, save
from bnn_runner.evaluation.predictive import log_mixture
from bnn_runner.metrics.joint import Joint
from bnn_runner.metrics.marginal import Marginal
from bnn_runner.models.likelihoods import Categorical, Gaussian
from bnn_runner.tasks import Split, Task, TaskSpec


def rand(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def make_task(kind="regression", num_points=23, num_outputs=1, seed=0, unavailable=None, dtype=torch.float64):
    """Inputs [N, 2] of made-up points; a task whose splits differ in size and in ids."""

    def split(n, salt, labels=True):
        x = rand(n, 2, seed=seed + salt).to(dtype)
        y = rand(n, num_outputs, seed=seed + salt + 50).to(dtype)
        if kind == "classification":
            y = torch.randint(num_outputs, (n,), generator=torch.Generator().manual_seed(seed + salt))
        return Split(x, y if labels else None, torch.arange(n) + 100 * salt)

    mean, scale = torch.zeros(num_outputs).to(dtype), torch.ones(num_outputs).to(dtype)
    if kind == "regression":
        mean, scale = mean + 10, scale * torch.arange(2, 2 + num_outputs)
    return Task(
        TaskSpec("made", kind, (2,), num_outputs, 0.1),
        split(40, 1),
        split(9, 2),
        split(num_points, 3),
        {"far": split(31, 4, labels=False)},
        "0",
        mean,
        scale,
        unavailable=unavailable or {},
    )


@dataclass(frozen=True)
class LinearDraws:
    weights: torch.Tensor  # [S, 2, K]
    log_weights: torch.Tensor
    likelihood: object = None
    floats_per_draw: int = 2

    def __len__(self):
        return len(self.weights)

    def __getitem__(self, part):
        likelihood = self.likelihood
        if getattr(likelihood, "log_noise", torch.zeros(())).dim() == 3:  # [S, 1, K]: noise of each draw's own
            likelihood = Gaussian(likelihood.log_noise[part])
        return replace(self, weights=self.weights[part], log_weights=self.log_weights[part], likelihood=likelihood)

    def __call__(self, x):
        return torch.einsum("bi,sik->sbk", x, self.weights.to(x.dtype))


class Linear:
    """f(x) = W'x with independent N(mean, covariance) columns: a posterior that knows everything."""

    finite = False
    report = {}
    treatment = {}

    def __init__(self, likelihood, num_outputs=1, draws_class=LinearDraws, log_weights=None, spread=0.3):
        self.likelihood, self.draws_class, self.log_weights = likelihood, draws_class, log_weights
        self.mean = rand(2, num_outputs, seed=9)
        self.covariance = spread * torch.tensor([[1.0, 0.5], [0.5, 2.0]]).double()

    def draws(self, num_draws, seed):
        noise = torch.stack([rand(2, self.mean.shape[1], seed=1000 * seed + s) for s in range(num_draws)])
        weights = self.mean + torch.linalg.cholesky(self.covariance) @ noise
        log_weights = torch.zeros(num_draws) if self.log_weights is None else self.log_weights
        return self.draws_class(weights, log_weights, self.likelihood)

    def moments(self, x):
        variance = torch.einsum("bi,ij,bj->b", x, self.covariance.to(x), x)
        return Moments(x @ self.mean.to(x), variance[:, None, None] * torch.eye(self.mean.shape[1]).to(x))

    def joint_covariance(self, split):
        x, _ = split.gather(torch.arange(len(split)))
        return x @ self.covariance.to(x) @ x.T


class OnlyDraws:
    """A posterior without closed forms, as a method with sampled weights has it."""

    report, treatment = {}, {}

    def __init__(self, inner, finite=False):
        self.inner, self.finite, self.likelihood = inner, finite, inner.likelihood

    def draws(self, num_draws, seed):
        return self.inner.draws(num_draws, seed)


def gaussian(num_outputs=1):
    return Gaussian(torch.linspace(-1.0, -0.5, num_outputs).double())


def run(task, posterior, predictive="draws", num_draws=12, batch_size=7, max_ood=2000, seed=3):
    return evaluate(task, posterior, predictive, num_draws, seed, batch_size, max_ood)


def equal(a, b):
    """Same tensors everywhere, to rounding."""
    assert a.splits.keys() == b.splits.keys()
    for name in a.splits:
        for field in ("ids", "loglik", "targets", "mean_probs", "mean_entropy", "means", "variances", "epistemic"):
            x, y = getattr(a.splits[name], field), getattr(b.splits[name], field)
            assert (x is None) == (y is None), field
            if x is not None:
                torch.testing.assert_close(x, y, rtol=1e-9, atol=1e-9)


def test_regression_draws_in_original_units():
    task, posterior = make_task(num_outputs=2), Linear(gaussian(2), 2)
    result = run(task, posterior)
    weights = posterior.draws(12, 3).weights
    means = task.target_mean + task.target_scale * torch.einsum("bi,sik->sbk", task.test.inputs, weights)
    sd = task.target_scale * torch.exp(gaussian(2).log_noise)
    y = task.target_mean + task.target_scale * task.test.targets
    torch.testing.assert_close(result.test.means, means)
    torch.testing.assert_close(result.test.variances, sd.square().reshape(1, 1, 2))
    torch.testing.assert_close(result.test.targets, y)
    torch.testing.assert_close(result.test.loglik, torch.distributions.Normal(means, sd).log_prob(y).sum(-1))
    assert result.splits["ood/far"].loglik is None and result.splits["ood/far"].means.shape == (12, 31, 2)
    assert result.has_joint and not result.finite and result.gaussian_joint is None  # two outputs


def test_class_draws():
    task = make_task("classification", num_outputs=3)
    log_weights = rand(12, seed=4)
    posterior = Linear(Categorical(), 3, log_weights=log_weights)
    result = run(task, posterior)
    log_probs = torch.log_softmax(posterior.draws(12, 3)(task.test.inputs), -1)
    weights = torch.softmax(log_weights, 0)
    torch.testing.assert_close(result.test.loglik, log_probs[:, torch.arange(23), task.test.targets])
    torch.testing.assert_close(result.test.mean_probs, torch.einsum("s,snk->nk", weights, log_probs.exp()))
    entropy = -(log_probs.exp() * log_probs).sum(-1)
    torch.testing.assert_close(result.test.mean_entropy, weights @ entropy)
    torch.testing.assert_close(result.log_weights, log_weights)


@pytest.mark.parametrize("kind", ["regression", "classification"])
def test_results_do_not_depend_on_chunks_and_batches(kind, monkeypatch):
    task = make_task(kind, num_outputs=3)
    posterior = Linear(gaussian(3) if kind == "regression" else Categorical(), 3)
    reference = run(task, posterior, batch_size=1000)
    for batch_size, floats in ((7, 10), (1, 4), (9, 1)):  # chunks of 5, 2 and 1 draws
        monkeypatch.setattr(module, "DRAW_FLOATS", floats)
        equal(run(task, posterior, batch_size=batch_size), reference)


def test_a_variance_per_point_is_kept(monkeypatch):
    class Heteroscedastic:
        def log_prob(self, outputs, y):
            mean, variance = self.mean_variance(outputs)
            return torch.distributions.Normal(mean, variance.sqrt()).log_prob(y).sum(-1)

        def mean_variance(self, outputs):
            return outputs[..., :1], torch.exp(outputs[..., 1:])

    task = make_task(num_outputs=1)
    posterior = OnlyDraws(Linear(Heteroscedastic(), 2))
    reference = run(task, posterior, batch_size=1000)
    assert reference.test.variances.shape == (12, 23, 1)
    outputs = posterior.draws(12, 3)(task.test.inputs)
    torch.testing.assert_close(reference.test.variances, task.target_scale**2 * torch.exp(outputs[..., 1:]))
    for batch_size, floats in ((11, 10), (1, 2), (8, 1)):
        monkeypatch.setattr(module, "DRAW_FLOATS", floats)
        equal(run(task, posterior, batch_size=batch_size), reference)


@pytest.mark.parametrize("floats", [1000, 10, 1])
def test_every_draw_may_have_its_own_noise(floats, monkeypatch):
    monkeypatch.setattr(module, "DRAW_FLOATS", floats)
    log_noise = rand(12, 1, 1, seed=5)
    task, posterior = make_task(), OnlyDraws(Linear(Gaussian(log_noise)))
    result = run(task, posterior)
    torch.testing.assert_close(result.test.variances, task.target_scale**2 * torch.exp(2 * log_noise))
    sd = result.test.variances.sqrt()
    expected = torch.distributions.Normal(result.test.means, sd).log_prob(result.test.targets).sum(-1)
    torch.testing.assert_close(result.test.loglik, expected)
    same = run(task, OnlyDraws(Linear(Gaussian(torch.zeros(12, 1, 1).double()))))
    assert same.test.variances.shape == (1, 1, 1)  # one number where all draws agree


def test_scores_in_original_units_do_not_depend_on_the_standardisation():
    # The same model told in other target units: y' = (y - a) / b, f' = (f - a) / b, sigma' = sigma / b.
    task, factor = make_task(), 4.0
    other = replace(
        task,
        target_scale=task.target_scale * factor,
        test=replace(task.test, targets=task.test.targets / factor),
        val=replace(task.val, targets=task.val.targets / factor),
    )
    a = Linear(Gaussian(torch.tensor([-0.7], dtype=torch.float64)))
    b = Linear(Gaussian(torch.tensor([-0.7 - math.log(factor)], dtype=torch.float64)))
    b.mean, b.covariance = a.mean / factor, a.covariance / factor**2
    for predictive in ("draws", "closed_form"):
        x, y = run(task, a, predictive), run(other, b, predictive)
        equal(x, y)
        torch.testing.assert_close(x.gaussian_joint.covariance, y.gaussian_joint.covariance)


@pytest.mark.parametrize("predictive", ["draws", "closed_form"])
def test_a_split_by_itself_scores_as_it_does_in_the_task(predictive):
    """Planted bug: the other splits change the draws, or the split goes by the task's own test set."""
    task, posterior = make_task(), Linear(gaussian())
    whole = run(task, posterior, predictive)
    for name, split in (("test", task.test), ("val", task.val), ("ood/far", task.ood["far"])):
        alone = evaluate_split(task, posterior, split, predictive, num_draws=12, seed=3, batch_size=7)
        assert list(alone.splits) == ["test"] and alone.gaussian_joint is None and not alone.unavailable
        for field in ("ids", "loglik", "targets", "means", "variances", "epistemic"):
            one, other = getattr(alone.test, field), getattr(whole.splits[name], field)
            assert (one is None) == (other is None)
            assert one is None or torch.equal(one, other), (name, field)


def test_out_of_distribution_sets_are_cut_by_the_seed_alone():
    task, posterior = make_task(unavailable={"gone": "no file"}), Linear(gaussian())
    a, b = run(task, posterior, max_ood=10), run(task, OnlyDraws(posterior), max_ood=10, num_draws=3)
    ids = a.splits["ood/far"].ids
    assert len(ids) == 10 and torch.equal(ids, b.splits["ood/far"].ids)
    assert not torch.equal(ids, run(task, posterior, max_ood=10, seed=4).splits["ood/far"].ids)
    assert a.unavailable == {"ood/gone": "no file"} and "ood/gone is not available: no file" in a.notes
    assert "ood/far: 10 of 31 points, chosen by the seed" in a.notes


def test_the_first_draws_are_the_same_when_more_are_asked_for():
    task, posterior = make_task(), Linear(gaussian())
    few, many = run(task, posterior, num_draws=4), run(task, posterior, num_draws=9)
    torch.testing.assert_close(few.test.loglik, many.test.loglik[:4])


class FreshDraws(LinearDraws):
    """Planted bug: other randomness at each call."""

    def __call__(self, x):
        return super().__call__(x) + 0.1 * torch.randn(len(self), len(x), 1).double()


class PerPointDraws(LinearDraws):
    """Planted bug: seeded, but noise of its own for each place in the batch."""

    def __call__(self, x):
        return super().__call__(x) + 0.1 * rand(len(self), len(x), 1)


class BatchDraws(LinearDraws):
    """Planted bug: outputs are centred over the batch, as batchnorm in training mode does."""

    def __call__(self, x):
        outputs = super().__call__(x)
        return outputs - outputs.mean(1, keepdim=True)


@pytest.mark.parametrize("draws_class", [FreshDraws, PerPointDraws, BatchDraws])
def test_draws_that_are_no_functions_are_refused(draws_class):
    with torch.random.fork_rng(), pytest.raises(RunFailed, match="must be one fixed function"):
        torch.manual_seed(0)
        run(make_task(), OnlyDraws(Linear(gaussian(), draws_class=draws_class)))


def test_draws_that_are_not_finite_are_counted():
    class Broken(LinearDraws):
        def __call__(self, x):
            outputs = super().__call__(x)
            outputs[self.weights[:, 0, 0] > 0] = math.nan
            return outputs

    posterior = OnlyDraws(Linear(gaussian(), draws_class=Broken, spread=3.0))
    bad = int((posterior.draws(12, 3).weights[:, 0, 0] > 0).sum())
    result = run(make_task(), posterior)
    assert 0 < bad < 12 and f"{bad} of 12 draws have outputs that are not finite" in result.notes
    score = Marginal()(result, 0)[0]
    assert math.isnan(score.value) and "not finite" in score.note


def test_memory_that_runs_out_halves_the_work():
    class Small(LinearDraws):
        def __call__(self, x):
            if len(self) * len(x) > 6:
                raise torch.OutOfMemoryError
            return super().__call__(x)

    draws = Small(rand(5, 2, 3), torch.zeros(5))
    x = rand(8, 2)
    torch.testing.assert_close(module.outputs_within_memory(draws, x), LinearDraws.__call__(draws, x))


def test_half_precision_outputs_are_widened_first():
    class Half(LinearDraws):
        def __call__(self, x):
            return super().__call__(x).to(torch.bfloat16)

    task = make_task("classification", num_outputs=3)
    result = run(task, Linear(Categorical(), 3, draws_class=Half))
    assert result.test.loglik.dtype == torch.float64
    torch.testing.assert_close(result.test.mean_probs.sum(-1), torch.ones(23).double())


def test_overconfident_classes_give_finite_scores():
    posterior = Linear(Categorical(), 3)
    posterior.mean = 1e4 * posterior.mean
    for predictive in ("draws", "closed_form", "bridge"):
        result = run(make_task("classification", num_outputs=3), posterior, predictive)
        assert torch.isfinite(result.test.loglik).all() and math.isfinite(Marginal()(result, 0)[0].value)


# ------------------------------------------------------------------------------ closed forms


def test_closed_form_regression():
    task, posterior = make_task(num_outputs=2), Linear(gaussian(2), 2)
    result = run(task, posterior, "closed_form")
    x = task.test.inputs
    f_variance = torch.einsum("bi,ij,bj->b", x, posterior.covariance, x)[:, None].expand(-1, 2)
    scale = task.target_scale
    variance = scale**2 * (f_variance + torch.exp(2 * gaussian(2).log_noise))
    mean = task.target_mean + scale * (x @ posterior.mean)
    y = task.target_mean + scale * task.test.targets
    torch.testing.assert_close(result.test.means[0], mean)
    torch.testing.assert_close(result.test.variances[0], variance)
    torch.testing.assert_close(result.test.epistemic, scale**2 * f_variance)
    torch.testing.assert_close(
        result.test.loglik[0], torch.distributions.Normal(mean, variance.sqrt()).log_prob(y).sum(-1)
    )
    assert not result.has_joint and len(result.log_weights) == 1 and result.predictive == "closed_form"


def test_gaussian_joint_is_that_of_the_draws():
    task, posterior = make_task(num_points=4), Linear(gaussian())
    result = run(task, posterior, num_draws=20_000)
    joint = result.gaussian_joint
    exact = float(gaussian_log_prob(result.test.targets[:, 0], joint.mean, joint.covariance))
    sums = result.test.loglik.sum(1)
    effective = float(1 / torch.softmax(sums, 0).square().sum())
    estimate = float(log_mixture(sums, torch.full((20_000,), -math.log(20_000)).double()))
    assert abs(estimate - exact) < 5 / math.sqrt(effective)
    torch.testing.assert_close(run(task, posterior, "closed_form").gaussian_joint.covariance, joint.covariance)


def test_no_gaussian_joint_for_many_points(monkeypatch):
    monkeypatch.setattr(exact_gaussian, "JOINT_POINTS", 10)
    result = run(make_task(), Linear(gaussian()))
    assert result.gaussian_joint is None and any("no exact Gaussian joint" in note for note in result.notes)


def test_probit_and_bridge_are_no_joint():
    task, posterior = make_task("classification", num_outputs=3), Linear(Categorical(), 3)
    for predictive, name in (("closed_form", "probit"), ("bridge", "bridge")):
        result = run(task, posterior, predictive)
        assert (result.predictive, result.has_joint, result.test.mean_entropy) == (name, False, None)
        assert Joint(taus=[2], repeats=1, tolerance=0.0)(result, 0)[0].status == "n/a"
        picked = result.test.mean_probs[torch.arange(23), task.test.targets].log()
        torch.testing.assert_close(result.test.loglik[0], picked)


def dense_moments(num_points=5, num_classes=4, scale=1.0):
    root = rand(num_points, num_classes, num_classes, seed=1) * math.sqrt(scale)
    return Moments(rand(num_points, num_classes, seed=2), root @ root.transpose(1, 2))


def test_probit_and_bridge_against_their_formulas():
    moments = dense_moments()
    for n in range(5):
        m, c = moments.mean[n], moments.covariance[n]
        expected = torch.softmax(m / torch.sqrt(1 + math.pi / 8 * c.diagonal()), 0)
        torch.testing.assert_close(probit_log_probs(moments.mean, variances(moments.covariance)[0])[n].exp(), expected)
        ones = torch.ones(4).double()
        total = ones @ c @ ones
        mean, cov = m - c @ ones * (ones @ m) / total, c - torch.outer(c @ ones, ones @ c) / total
        alpha = (1 - 2 / 4 + mean.exp() / 16 * (-mean).exp().sum()) / cov.diagonal()
        torch.testing.assert_close(bridge_log_probs(moments)[n].exp(), alpha / alpha.sum())


def test_probit_and_bridge_against_a_monte_carlo_mean():
    # Independent logits, which the probit form assumes. Both are approximations: what is asserted is that they are
    # near the Monte-Carlo mean, and that the probit form is nearer than no variance at all.
    moments = dense_moments(scale=0.5)
    variance = variances(moments.covariance)[0]
    moments = Moments(moments.mean, torch.diag_embed(variance))
    truth = torch.softmax(moments.mean + variance.sqrt() * rand(20_000, 5, 4, seed=3), -1).mean(0)
    probit, bridge = probit_log_probs(moments.mean, variance).exp(), bridge_log_probs(moments).exp()
    plain = torch.softmax(moments.mean, -1)
    assert float((probit - truth).abs().mean()) < 0.04
    assert float((bridge - truth).abs().mean()) < 0.1  # rough where the logits' variances differ, as here
    assert float((probit - truth).abs().mean()) < 0.7 * float((plain - truth).abs().mean())


def test_closed_forms_without_variance():
    moments = Moments(rand(3, 4), torch.zeros(3, 4, 4).double())
    torch.testing.assert_close(
        probit_log_probs(moments.mean, variances(moments.covariance)[0]), moments.mean.log_softmax(-1)
    )
    bridge = bridge_log_probs(moments).exp()
    torch.testing.assert_close(bridge.sum(-1), torch.ones(3).double())
    assert torch.equal(bridge.argmax(-1), moments.mean.argmax(-1))


def test_negative_variances():
    small = torch.diag_embed(torch.tensor([[1.0, -1e-9]]))
    variance, count = variances(small)
    assert count == 1 and float(variance.min()) == 0.0
    with pytest.raises(RunFailed, match="Predictive variances must not be negative"):
        variances(torch.diag_embed(torch.tensor([[1.0, -0.1]])))


def test_mistakes_are_told():
    task, posterior = make_task(), Linear(gaussian())
    with pytest.raises(UserError) as caught:
        evaluate(task, posterior, "bridge", 0, 0, 0, 10)
    assert len(caught.value.problems) == 3
    with pytest.raises(UserError, match="closed form"):
        run(task, OnlyDraws(posterior), "closed_form")


def test_progress_reaches_its_total():
    seen = []
    evaluate(
        make_task(), Linear(gaussian()), "draws", 5, 0, 10, 100, lambda stage, done, total: seen.append((done, total))
    )
    assert [d for d, _ in seen] == list(range(1, len(seen) + 1)) and seen[-1][0] == seen[-1][1]


# ------------------------------------------------------------------------------------- store


@pytest.mark.parametrize("predictive", ["draws", "closed_form"])
@pytest.mark.parametrize("kind", ["regression", "classification"])
def test_store_gives_back_what_it_was_given(kind, predictive, tmp_path):
    posterior = Linear(gaussian() if kind == "regression" else Categorical(), 1 if kind == "regression" else 3)
    result = run(
        make_task(kind, num_outputs=posterior.mean.shape[1], unavailable={"gone": "no: file"}), posterior, predictive
    )
    save(result, tmp_path / "cell")
    again = load(tmp_path / "cell")
    equal(result, again)
    for field in ("kind", "predictive", "finite", "has_joint", "unavailable", "notes"):
        assert getattr(result, field) == getattr(again, field)
    assert torch.equal(result.log_weights, again.log_weights)
    assert (result.gaussian_joint is None) == (again.gaussian_joint is None) == (kind == "classification")
    assert Joint(taus=[2], repeats=2, tolerance=0.0)(again, 5) == Joint(taus=[2], repeats=2, tolerance=0.0)(
        result, 5
    ) or (kind == "classification" and predictive == "closed_form")
    assert sorted(p.name for p in (tmp_path / "cell").iterdir()) == sorted([TENSORS, FACTS])


def test_store_refuses_a_damaged_file(tmp_path):
    result = run(make_task(), Linear(gaussian()))

    def damaged(match, change):
        save(result, tmp_path)
        change()
        with pytest.raises(DamagedEvaluation, match=match) as caught:
            load(tmp_path)
        assert "force=true" in str(caught.value)

    tensors, facts = tmp_path / TENSORS, tmp_path / FACTS
    damaged("does not match", lambda: tensors.write_bytes(tensors.read_bytes()[: tensors.stat().st_size // 2]))
    damaged("does not match", lambda: tensors.write_bytes(tensors.read_bytes()[:-1] + b"\x07"))
    damaged("not valid JSON", lambda: facts.write_text(facts.read_text()[:20]))
    damaged("format", lambda: facts.write_text(json.dumps(json.loads(facts.read_text()) | {"format": 0})))
    damaged("is missing", tensors.unlink)
    damaged("is missing", facts.unlink)
