"""Memory that runs out, budgets, factorisations that fail and precision flags: injected, and what comes of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from bnn_runner.curvature import weighted_gram
from bnn_runner.curvature.jacobian_forms import OuterProductJacobian
from bnn_runner.curvature.jacobians import BatchJacobians, Jacobians
from bnn_runner.curvature.products import Differentiated
from bnn_runner.curvature.psd import Repairs, cholesky, eigh
from bnn_runner.curvature.structures import fit_structure
from bnn_runner.errors import RunFailed
from bnn_runner.laplace import dual_tangent
from bnn_runner.laplace.tangent_optimum import TangentModel
from bnn_runner.methods.laplace import Laplace
from bnn_runner.methods.laplace_functional import LaplaceFunctional
from bnn_runner.methods.laplace_sampled import LaplaceSampled
from bnn_runner.models.cnn import CNN
from bnn_runner.models.mlp import MLP
from bnn_runner.runtime.memory import TooLarge, limited_memory, memory_limit
from bnn_runner.runtime.torch_state import true_float32
from tests.problems import context, make_network, make_task

ERRORS: list[Callable[[], RuntimeError]] = [
    lambda: torch.OutOfMemoryError("CUDA out of memory"),
    lambda: RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 8 bytes"),
]


def scarce(monkeypatch: pytest.MonkeyPatch, most: int, error: Callable[[], RuntimeError]) -> list[int]:
    """Memory for `most` points at once; gives the sizes that were asked for."""
    asked: list[int] = []
    plain = Jacobians.__call__

    def call(self: Jacobians, x: torch.Tensor, root: Any = None) -> Any:
        asked.append(len(x))
        if len(x) > most:
            raise error()
        return plain(self, x, root)

    differentiate = Differentiated.__init__

    def made(self: Differentiated, jacobians: Jacobians, x: torch.Tensor) -> None:
        asked.append(len(x))
        if len(x) > most:
            raise error()
        differentiate(self, jacobians, x)

    monkeypatch.setattr(Jacobians, "__call__", call)
    monkeypatch.setattr(Differentiated, "__init__", made)
    return asked


@pytest.mark.parametrize("structure", ["full", "kfac", "ekfac", "diag", "block"])
@pytest.mark.parametrize("error", ERRORS)
def test_out_of_memory_halves_chunks_and_goes_on(
    structure: Any, error: Callable[[], RuntimeError], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Planted bug: a pass goes on where it was, and counts the points before the failure twice."""
    task = make_task("classification", (5,), 3)
    network = make_network(MLP((6,), "tanh"), task)
    method = Laplace(structure=structure, predict="closed_form")
    expected = method.fit(task, [network], context())
    asked = scarce(monkeypatch, 7, error)
    found = method.fit(task, [network], context())
    halvings = found.report.repairs["out_of_memory_halved"]
    assert halvings == 7  # 512, of which 40 are there, to 4
    assert max(asked[-3:]) <= 4
    assert found.report.facts["evidence_nats"] == pytest.approx(expected.report.facts["evidence_nats"], rel=1e-10)
    moments, wanted = found.moments(task.test.inputs), expected.moments(task.test.inputs)  # type: ignore[union-attr]
    assert torch.allclose(moments.covariance, wanted.covariance, rtol=1e-9)


def test_predictions_halve_too(monkeypatch: pytest.MonkeyPatch) -> None:
    task = make_task("regression", (5,), 2)
    network = make_network(MLP((6,), "tanh"), task)
    posterior = Laplace(structure="kfac", predict="closed_form").fit(task, [network], context())
    wanted = posterior.moments(task.test.inputs).covariance  # type: ignore[union-attr]
    asked = scarce(monkeypatch, 5, ERRORS[0])
    found = posterior.moments(task.test.inputs).covariance  # type: ignore[union-attr]
    assert torch.allclose(found, wanted, rtol=1e-10) and max(asked) == 12 and asked[-1] <= 5


PASSES: dict[str, tuple[Any, bool]] = {
    "v* by kept Jacobians": (Laplace(structure="diag", mode="tangent"), True),
    "v* by products": (Laplace(structure="diag", mode="tangent"), False),
    "v* in function space": (Laplace(structure="diag", mode="tangent"), True),
    "sampled, rows kept": (LaplaceSampled(samples=2, probes=2, tolerance=1e-6), True),
    "sampled": (LaplaceSampled(samples=2, probes=2, tolerance=1e-6), False),
    "sampled, sgd": (LaplaceSampled(samples=2, probes=2, solver="sgd", objective="noisy_targets"), False),
    "features": (LaplaceFunctional(form="nystrom", features=4), False),
}


@pytest.mark.parametrize("name", PASSES)
def test_out_of_memory_halves_every_pass(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tangent, sampled and functional passes, and draws. Planted bugs: a sum that goes on; pieces kept twice."""
    method, kept = PASSES[name]
    task = make_task("classification", (5,), 3)
    network = make_network(MLP((6,), "tanh"), task)
    if not kept:
        monkeypatch.setattr("bnn_runner.runtime.memory.KEPT_BYTES", 0)
    monkeypatch.setattr(TangentModel, "in_function_space", name == "v* in function space")
    expected = method.fit(task, [network], context())
    wanted = expected.draws(3, 1)(task.test.inputs)
    asked = scarce(monkeypatch, 7, ERRORS[0])
    found = method.fit(task, [network], context())
    assert found.report.repairs["out_of_memory_halved"] >= 4
    assert any(size > 7 for size in asked), "the passes were never short of memory"
    assert found.report.facts["evidence_nats"] == pytest.approx(expected.report.facts["evidence_nats"], rel=1e-7)
    assert torch.allclose(found.draws(3, 1)(task.test.inputs), wanted, rtol=1e-5, atol=1e-6)
    if name == "v* by kept Jacobians":
        assert not TangentModel(task, found.jacobians, _fits=False).keeps


def test_kept_jacobians_are_within_the_budget() -> None:
    task = make_task("classification", (5,), 3)
    network = make_network(MLP((6,), "tanh"), task)
    model = TangentModel(task, Jacobians(network))
    assert model.keeps and model.in_function_space == dual_tangent.affordable(task, model.jacobians)
    with limited_memory(4e-5):  # a quarter of 43 kB; the rows take 55 kB
        assert not model.keeps and not dual_tangent.affordable(task, model.jacobians)
        settled = Laplace(structure="diag", mode="tangent").fit(task, [network], context()).report.facts
    plain = Laplace(structure="diag", mode="tangent").fit(task, [network], context()).report.facts
    assert settled["tangent_settled"] and settled["tangent_passes"] > 2
    assert settled["evidence_nats"] == pytest.approx(plain["evidence_nats"], rel=1e-7)


def test_one_point_that_does_not_fit_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    task = make_task("regression", (5,), 1)
    network = make_network(MLP((6,), "tanh"), task)
    jacobians = Jacobians(network)
    scarce(monkeypatch, 0, ERRORS[0])
    monkeypatch.setattr(Jacobians, "learn_shapes", lambda self, x: None)
    with pytest.raises(RunFailed, match="one point at a time"):
        fit_structure("diag", Laplace(structure="diag").passes(jacobians, task, context(), Repairs()))


def test_other_errors_are_not_taken_for_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    task = make_task("regression", (5,), 1)
    network = make_network(MLP((6,), "tanh"), task)
    scarce(monkeypatch, 3, lambda: RuntimeError("shapes do not fit"))
    with pytest.raises(RuntimeError, match="shapes do not fit"):
        Laplace(structure="diag").fit(task, [network], context())


def test_a_budget_sizes_chunks_and_changes_no_number() -> None:
    task = make_task("classification", (1, 8, 8), 3)
    network = make_network(CNN((4,), (3,), "relu"), task)
    method = Laplace(structure="kfac", predict="closed_form")
    expected = method.fit(task, [network], context())
    with limited_memory(1e-4):
        found = method.fit(task, [network], context())
        sizes = [found.jacobians.batch_size(3, use="factors"), found.jacobians.batch_size(3)]
        with limited_memory(1e-3):
            wider = found.jacobians.batch_size(3, use="factors")
    assert sizes[1] <= sizes[0] < wider <= expected.jacobians.batch_size(3, use="factors")
    assert found.report.facts["evidence_nats"] == pytest.approx(expected.report.facts["evidence_nats"], rel=1e-10)


@pytest.mark.parametrize("structure", ["kfac", "ekfac", "diag"])
def test_dense_jacobians_are_of_one_layer_and_a_few_points(structure: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Planted bug: the variance of a batch through the dense Jacobian of all of its points."""
    task = make_task("classification", (1, 8, 8), 3)
    network = make_network(CNN((4,), (3,), "relu"), task)
    expected = Laplace(structure=structure).fit(task, [network], context()).moments(task.test.inputs)  # type: ignore[union-attr]
    made: list[int] = []
    plain = OuterProductJacobian.dense

    def dense(self: OuterProductJacobian) -> torch.Tensor:
        made.append(len(self.grads))
        return plain(self)

    def refused(self: BatchJacobians) -> torch.Tensor:
        raise AssertionError("the dense Jacobian of all weights")

    monkeypatch.setattr(BatchJacobians, "dense", refused)
    monkeypatch.setattr(weighted_gram, "FLOATS_CACHED", 2 * 3 * 36)
    posterior = Laplace(structure=structure).fit(task, [network], context())
    made.clear()  # of the check at the first points
    monkeypatch.setattr(OuterProductJacobian, "dense", dense)
    found = posterior.moments(task.test.inputs)  # type: ignore[union-attr]
    assert torch.allclose(found.covariance, expected.covariance, rtol=1e-10)
    assert made == [2] * 6


def test_large_matrices_are_told_of_and_refused_beyond_the_budget() -> None:
    told: list[str] = []
    with limited_memory(2, told.append):
        memory_limit().reserve("a small matrix", 2**20, "")
        memory_limit().reserve("a large matrix", 2**30, "")
        with pytest.raises(TooLarge, match=r"about 3 GiB; the limit is 2 GiB .*memory_gb=2.*Take less\."):
            memory_limit().reserve("a larger matrix", 3 * 2**30, "Take less.")
    assert told == ["memory   a large matrix: about 1 GiB"]
    assert memory_limit().gigabytes is None
    task = make_task("regression", (5,), 1)
    network = make_network(MLP((6,), "tanh"), task)
    with limited_memory(1e-6):
        for structure in ("full", "block", "kfac"):
            with pytest.raises(RunFailed, match="memory_gb=1e-06"):
                Laplace(structure=structure).fit(task, [network], context())  # type: ignore[arg-type]


@pytest.mark.parametrize("kind", ["eigh", "cholesky_ex"])
def test_a_factorisation_that_fails_is_made_on_the_cpu(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    root = torch.randn(5, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    matrix = root @ root.T + torch.eye(5, dtype=torch.float64)
    plain, calls = getattr(torch.linalg, kind), []

    def failing(values: torch.Tensor) -> Any:
        calls.append(values.dtype)
        if len(calls) == 1:
            raise RuntimeError("cusolver error: CUSOLVER_STATUS_EXECUTION_FAILED")
        return plain(values)

    monkeypatch.setattr(torch.linalg, kind, failing)
    repairs = Repairs()
    if kind == "eigh":
        values, vectors = eigh(matrix.float(), "the test", repairs)
        assert torch.allclose((vectors * values) @ vectors.T, matrix, atol=1e-5)
        assert repairs == {"eigh_on_cpu": 1}
    else:
        factor = cholesky(matrix.float(), "the test", repairs)
        assert torch.allclose(factor @ factor.T, matrix, atol=1e-5)
        assert repairs == {"cholesky_on_cpu": 1}
    assert calls == [torch.float64] * 2


@pytest.mark.parametrize("size", [1e-9, 1.0, 1.3, 1e9])  # at 1.3 LAPACK's solver fails on one processor of ours
def test_rows_without_curvature_are_not_given_to_the_solver(size: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """Among many rows of zeros LAPACK's eigh now and then does not converge. Planted bugs: the solver sees them; their
    eigenvectors left 0; the eigenvectors of the others in the wrong rows."""
    root = torch.randn(16, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    matrix = torch.zeros(400, 400, dtype=torch.float64)
    matrix[23::25, 23::25] = size * (root @ root.T)
    seen, plain = [], torch.linalg.eigh

    def watched(values: torch.Tensor) -> Any:
        seen.append(values.shape)
        return plain(values)

    monkeypatch.setattr(torch.linalg, "eigh", watched)
    repairs = Repairs()
    values, vectors = eigh(matrix, "the test", repairs)
    expected = torch.linalg.svdvals(root).square().sort().values * size
    torch.testing.assert_close(values[-4:], expected, rtol=1e-12, atol=0)
    largest = float(expected.max())
    assert float(values[:-4].max()) < 1e-13 * largest
    assert float(((vectors * values) @ vectors.T - matrix).abs().max()) < 1e-13 * largest
    torch.testing.assert_close(vectors.T @ vectors, torch.eye(400, dtype=torch.float64))
    assert seen == [(16, 16)] and not repairs
    assert eigh(torch.zeros(3, 3), "the test", repairs)[1].equal(torch.eye(3, dtype=torch.float64))


def test_a_solver_that_does_not_converge_gives_way_to_another(monkeypatch: pytest.MonkeyPatch) -> None:
    """Planted bugs: values left in descending order; the upper triangle, which holds no numbers here, read; a negative
    eigenvalue taken for a positive one."""

    def failing(values: torch.Tensor) -> Any:
        raise torch.linalg.LinAlgError("did not converge")

    root = torch.randn(6, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    lower = (root @ root.T).tril() + torch.full((6, 6), 7.0, dtype=torch.float64).triu(1)
    expected = torch.linalg.eigvalsh(root @ root.T)
    monkeypatch.setattr(torch.linalg, "eigh", failing)
    repairs = Repairs()
    values, vectors = eigh(lower, "the test", repairs)
    torch.testing.assert_close(values, expected, rtol=1e-10, atol=1e-12)
    assert float(((vectors * values) @ vectors.T - root @ root.T).abs().max()) < 1e-12
    assert repairs == {"eigh_on_cpu": 1, "eigh_by_svd": 1}
    values, _ = eigh(torch.diag(torch.tensor([2.0, -0.5, 1.0])), "the test", repairs)
    assert values.tolist() == [0.0, 1.0, 2.0] and repairs["negative_eigenvalue"] == 1


def test_a_factorisation_that_fails_everywhere_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    def failing(values: torch.Tensor) -> Any:
        raise torch.linalg.LinAlgError("did not converge")

    monkeypatch.setattr(torch.linalg, "eigh", failing)
    monkeypatch.setattr(torch.linalg, "svd", failing)
    with pytest.raises(RunFailed, match=r"Could not decompose hidden\.0\.weight, on the CPU either"):
        eigh(torch.eye(3), "hidden.0.weight", Repairs())


def test_posterior_algebra_is_true_float32_whatever_the_flags_of_training() -> None:
    """Planted bug: only the flags of CUDA's products are set, and products on the CPU stay in bfloat16."""
    backends: Any = torch.backends
    places = [backends.cuda.matmul, backends.cudnn.conv, backends.mkldnn.matmul, backends.mkldnn.conv]
    before = [place.fp32_precision for place in places]
    try:
        torch.set_float32_matmul_precision("medium")
        set_so = [place.fp32_precision for place in places]
        assert set_so[0] == "tf32" and set_so[2] == "bf16"
        with torch.autocast("cpu", torch.bfloat16), true_float32():
            assert [place.fp32_precision for place in places] == ["ieee"] * 4
            assert (torch.ones(2, 2) @ torch.ones(2, 2)).dtype == torch.float32
        assert [place.fp32_precision for place in places] == set_so
    finally:
        torch.set_float32_matmul_precision("highest")
        for place, precision in zip(places, before, strict=True):
            place.fp32_precision = precision
