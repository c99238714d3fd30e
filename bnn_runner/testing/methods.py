"""The contract of a method: its draws are frozen functions, its slices nested, and it leaves no trace."""

from __future__ import annotations

import dataclasses
import json
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from bnn_runner.base import ClosedForm, FitReport, HyperRule, Method, Model, Network, Posterior
from bnn_runner.evaluation.evaluate import evaluate
from bnn_runner.hyper.fixed import Fixed
from bnn_runner.models.mlp import MLP
from bnn_runner.posteriors import io
from bnn_runner.tasks import Task
from bnn_runner.testing.expect import (
    require,
    require_equal,
    require_plain,
    require_sentences,
    require_unchanged,
    snapshot,
)
from bnn_runner.testing.problems import KINDS, context, fitting_task, make_network, unlike

SEED, NUM_DRAWS = 3, 5
MODELS: tuple[Model, ...] = (MLP(hidden=(6, 6)), MLP(hidden=(6, 6), activation="relu", norm="batch"))
"""Networks a method is checked on unless others are given: one with batch normalisation, whose modes differ."""


@dataclass(frozen=True)
class MethodCase:
    """A method fitted to untrained networks of one model on a small task."""

    method: Method
    model: Model
    task: Task
    networks: Sequence[Network]
    posterior: Posterior
    hyper: HyperRule

    @cached_property
    def outputs(self) -> Tensor:
        """[S, N, K] of the first draws at the test points, from one call."""
        return self.posterior.draws(NUM_DRAWS, SEED)(self.x)

    @property
    def x(self) -> Tensor:
        """The test points [N, ...]."""
        inputs = self.task.test.inputs
        assert isinstance(inputs, Tensor)
        return inputs

    @property
    def y(self) -> Tensor:
        """Their targets."""
        targets = self.task.test.targets
        assert targets is not None
        return targets


def fit_case(
    method: Method, model: Model, kind: str, hyper: HyperRule | None = None, task: Task | None = None
) -> MethodCase | list[str]:
    """The fitted case; or the method's reasons against this kind of task."""
    rule = hyper or Fixed()
    task = task or fitting_task(model, kind)
    problems = method.problems(task.spec, rule)
    require_sentences(problems, f"{type(method).__name__}.problems")
    if problems:
        return problems
    networks = [
        make_network(model, task, seed=spec.member, noise_transform=spec.noise_transform) for spec in method.needs()
    ]
    posterior = method.fit(task, networks, context(rule))
    return MethodCase(method, model, task, networks, posterior, rule)


def check_method(
    method: Method,
    models: Sequence[Model] = MODELS,
    kinds: Sequence[str] = KINDS,
    hyper: HyperRule | None = None,
    saves: bool = True,
    allow: Sequence[str] = (),
) -> None:
    """The whole contract of a method, on each of `models` and each kind of task that it does not refuse.

    - A draw is one frozen function: the same for every batch that a point is in; draws differ.
    - `draws[a:b]` are nested slices, and draw s depends on (seed, s) alone.
    - `finite` is true for a posterior whose draws are all of it, and only then.
    - `problems` returns sentences; `treatment` names every parameter tensor of the network.
    - Fit, draws and evaluation change no global state and nothing of the networks that are given.
    - The posterior can be saved and loaded, and then gives the same draws bit for bit.

    Args:
        method: an instance, small enough to be fitted in seconds.
        models: networks to fit it to; small perceptrons unless given.
        kinds: kinds of task, "regression" and "classification".
        hyper: the rule for the prior precision; hyper=fixed unless given.
        saves: whether the posterior can be saved (`save_posterior=true`).
        allow: packages of its classes, as in `allow=[mypackage]`; that of the method is added.

    Raises:
        AssertionError: saying which line of the contract does not hold.
    """
    name = type(method).__name__
    require(dataclasses.is_dataclass(method), f"{name} must be a frozen dataclass whose fields are its YAML's keys.")
    require(isinstance(method, Method), f"{name} must have uses_hyper, finite, predictive, problems, needs and fit.")
    reasons: list[str] = []
    fitted = 0
    for model in models:
        for kind in kinds:
            case = fit_case(method, model, kind, hyper)
            if isinstance(case, list):
                reasons += case
                continue
            fitted += 1
            check_frozen_draws(case)
            check_nested_slices(case)
            check_seed(case)
            check_treatment(case)
            if saves:
                check_saved(case, [*allow, type(method).__module__.split(".")[0]])
            check_no_traces(case)
    require(fitted > 0, f"{name} must serve a regression or a classification; got only refusals: {' '.join(reasons)}")


def check_frozen_draws(case: MethodCase) -> None:
    """`draws(x)` are the same functions however the points are split, ordered and accompanied."""
    draws, x, whole = case.posterior.draws(NUM_DRAWS, SEED), case.x, case.outputs
    size = len(draws)
    require(
        case.posterior.finite or size == NUM_DRAWS,
        f"draws({NUM_DRAWS}, seed) must have {NUM_DRAWS} draws unless the posterior is finite; got {size}.",
    )
    shape = (size, len(x), case.task.spec.num_outputs)
    require(whole.shape == shape, f"draws(x) must be [S, B, K] = {list(shape)}; got {list(whole.shape)}.")
    advice = "Draw all randomness in posterior.draws(num_draws, seed), none in the call, and evaluate in eval mode."
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(1))
    pieces = x[order].split([1, len(x) - 1])
    require_equal(
        torch.cat([draws(piece) for piece in pieces], dim=1),
        whole[:, order],
        f"A draw must be one function of x, however points are split into batches and ordered. {advice}",
    )
    crowd = torch.cat([unlike(case.task.train.gather(torch.arange(1))[0]), x[2:3], x[2:3]])
    require_equal(
        draws(crowd)[:, 1:],
        whole[:, [2, 2]],
        f"A draw's output at a point must not depend on the other points of the batch. {advice}",
    )
    require(
        case.posterior.finite or float(whole.std(0).min()) > 0,
        "Draws of a posterior that is not finite must differ from one another; got equal ones.",
    )


def check_nested_slices(case: MethodCase) -> None:
    """`draws[a:b]` are draws a to b, with their noise and weights; more draws begin with the same ones."""
    draws, x, y = case.posterior.draws(NUM_DRAWS, SEED), case.x[:2], case.y[:2]
    whole, size = case.outputs[:, :2], len(draws)
    loglik = draws.likelihood.log_prob(whole, y)
    require(
        loglik.shape == (size, len(x)) and draws.log_weights.shape == (size,),
        f"log_prob(draws(x), y) must be [S, B] and log_weights [S]; got {list(loglik.shape)} and "
        f"{list(draws.log_weights.shape)} for S = {size}.",
    )
    for a, b in {(0, 1), (size // 2, size), (size - 1, size + 3)}:
        part = draws[a:b]
        require(len(part) == min(b, size) - a, f"draws[{a}:{b}] of {size} draws must have {min(b, size) - a}.")
        result = part(x)
        require_equal(result, whole[a:b], f"draws[{a}:{b}] must be draws {a} to {b} of the same sequence.")
        require_equal(
            part.likelihood.log_prob(result, y),
            loglik[a:b],
            f"The likelihood of draws[{a}:{b}] must be that of these draws: slice a noise of their own as well.",
        )
        require(torch.equal(part.log_weights, draws.log_weights[a:b]), "A slice must keep the weights of its draws.")
    if size > 3:
        require_equal(draws[1:][1:3](x), whole[2:4], "A slice of a slice must count from the start of that slice.")
    nested = "Draw s must depend on (seed, s) alone: the first draws of a longer sequence must be the same."
    more = case.posterior.draws(NUM_DRAWS + 2, SEED)
    require_equal(more(x)[:size], whole, nested)
    if not case.posterior.finite:
        require_equal(case.posterior.draws(2, SEED)(x), whole[:2], nested)


def check_seed(case: MethodCase) -> None:
    """Another seed gives other draws, except of a finite posterior; `finite` is that of the method."""
    other = case.posterior.draws(NUM_DRAWS, SEED + 1)(case.x)
    finite = case.posterior.finite
    stated = case.method.finite
    require(stated is finite, f"`finite` of method and posterior must agree; got {stated} and {finite}.")
    if finite:
        require_equal(other, case.outputs, "A finite posterior must give all of its draws, whatever the seed.")
    else:
        moved = float((other - case.outputs).abs().amax((1, 2)).min())
        require(moved > 1e-6, "Every draw must change with the seed: use the seed given to draws(num_draws, seed).")


def check_treatment(case: MethodCase) -> None:
    """`treatment` says for every parameter tensor how it was treated; `report` is a `FitReport` of plain values."""
    treated, names = set(case.posterior.treatment), set(case.networks[0].parameters)
    require(
        treated == names,
        f"treatment must name every parameter tensor of the network; missing: {sorted(names - treated)}, "
        f"unknown: {sorted(treated - names)}.",
    )
    report = case.posterior.report
    require(isinstance(report, FitReport), f"The posterior's report must be a FitReport; got {report!r}.")
    for key, value in report.row().items():
        require_plain(value, f"report.facts[{key!r}]")


def check_saved(case: MethodCase, allow: Sequence[str] = ()) -> None:
    """The posterior, saved and loaded on a new module, gives the same draws bit for bit."""
    belongs = {"check": "1"}
    x, y = case.x, case.y
    module = case.model.build(case.task.spec)
    if (noise_transform := case.method.needs()[0].noise_transform) is not None:
        noise_transform.apply(module)
    with tempfile.TemporaryDirectory() as folder:
        try:
            io.save(case.posterior, Path(folder), belongs)
        except io.CannotBeSaved as error:
            raise AssertionError(
                f"A posterior to be saved must consist of frozen dataclasses, tensors and plain values: {error}. Make "
                "the part one, give it state() and from_state() (`posteriors.io.Saves`), or check with saves=False."
            ) from None
        loaded = io.load(Path(folder), belongs, module.double(), torch.device("cpu"), allow)
    before, after = case.posterior.draws(NUM_DRAWS, SEED), loaded.draws(NUM_DRAWS, SEED)
    message = "A loaded posterior must give the same draws bit for bit: keep every tensor it uses in its fields."
    require_equal(after(x), before(x), message, tolerance=0)
    require_equal(after[-1:](x), before[-1:](x), message, tolerance=0)
    require_equal(
        after.likelihood.log_prob(after(x), y), before.likelihood.log_prob(before(x), y), message, tolerance=0
    )
    same = loaded.finite == case.posterior.finite and dict(loaded.treatment) == dict(case.posterior.treatment)
    require(same, "A loaded posterior must have the same `finite` and `treatment`.")
    texts = [json.dumps(p.report.row()) for p in (case.posterior, loaded)]
    require(texts[0] == texts[1], f"A loaded posterior must have the same report; got {texts[1]} for {texts[0]}.")
    if isinstance(case.posterior, ClosedForm) and isinstance(loaded, ClosedForm):
        require_equal(loaded.moments(x).covariance, case.posterior.moments(x).covariance, message, tolerance=0)


def check_no_traces(case: MethodCase) -> None:
    """Fit, draws, moments and evaluation leave the global state and the networks as they were, and reproduce."""
    for network in case.networks:
        for i, part in enumerate(network.module.modules()):
            part.training = i % 2 == 0
        with torch.no_grad():  # the module's own weights are nobody's business
            for i, p in enumerate(network.module.parameters()):
                p.add_(1e-3).requires_grad_(i > 0)
    require(
        torch.get_default_dtype() == torch.float32 and torch.is_grad_enabled(),
        "The default dtype must be float32 and gradients enabled; an earlier fit has changed them.",
    )
    torch.manual_seed(12345)  # the fit of the case saw another state of the global generator
    before = snapshot(case.networks)

    def step(name: str, work: Callable[[], Any]) -> Any:
        result = work()
        require_unchanged(before, snapshot(case.networks), name)
        return result

    task, method = case.task, case.method
    posterior = step("fit", lambda: method.fit(task, case.networks, context(case.hyper)))
    draws = step("draws", lambda: posterior.draws(NUM_DRAWS, SEED))
    require_equal(
        step("draws(x)", lambda: draws(case.x)),
        case.outputs,
        "A second fit must give the same draws: take every random number from generator(context.seed, NAME).",
    )
    if isinstance(posterior, ClosedForm):
        step("moments", lambda: posterior.moments(case.x))
        step("joint_covariance", lambda: posterior.joint_covariance(task.test))
    evaluation = step(
        "evaluate",
        lambda: evaluate(task, posterior, method.predictive, num_draws=NUM_DRAWS, seed=SEED, batch_size=3, max_ood=1),
    )
    names = set(evaluation.splits)
    require(names == {"test", "val", "ood/other"}, f"An evaluation must score every split; got {sorted(names)}.")
    for name, split in (("test", task.test), ("val", task.val)):
        loglik = evaluation.splits[name].loglik
        require(loglik is not None and bool(torch.isfinite(loglik).all()), f"Log-likelihoods of {name} must be finite.")
        if method.predictive == "draws":
            whole = case.outputs if name == "test" else draws(split.inputs)
            expected = draws.likelihood.log_prob(whole, split.targets) - task.target_scale.log().sum()
            require_equal(loglik, expected, f"Log-likelihoods of {name} must be those of the draws, [S, N].")
