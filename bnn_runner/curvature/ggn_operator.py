"""The curvature of a task as an operator: products with H = Σ_n J_nᵀ R_n R_nᵀ J_n, without a P × P matrix.

Its rows are the N·C directions Rᵀ J of the training set. They are kept where they are few; otherwise
each pass over the data computes them again, batch after batch, in the form of each layer
(`jacobian_forms`), so that memory does not grow with N or with the number of vectors.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor

from bnn_runner.base import Likelihood, Network
from bnn_runner.curvature.block_fits import squares
from bnn_runner.curvature.jacobian_forms import widened
from bnn_runner.curvature.jacobians import BatchJacobians, Jacobians
from bnn_runner.curvature.psd import Repairs, wide
from bnn_runner.posteriors.io import CannotBeSaved
from bnn_runner.rng import generator
from bnn_runner.runtime.console import Progress
from bnn_runner.runtime.memory import halving, memory_limit
from bnn_runner.tasks import Split, Task

SAVED_BYTES = 2**30
"""A posterior carries its training inputs up to this size."""


class Roots(Protocol):
    """Which root R of the output curvature is used: an `OutputCurvature`, or plain outputs."""

    def columns(self, task: Task, network: Network) -> int: ...

    def uniforms(self, task: Task) -> Tensor | None: ...

    def root(self, likelihood: Likelihood, outputs: Tensor, y: Tensor, uniforms: Tensor | None) -> Tensor: ...


@dataclass(frozen=True)
class Rows:
    """The rows Rᵀ J of B points: kept [B, C, P], or as the Jacobians' factors."""

    kept: Tensor | None
    factors: BatchJacobians | None

    def jvp(self, vectors: Tensor) -> Tensor:
        """Rᵀ J v for vectors [S, P]: [B, C, S]."""
        if self.kept is not None:
            return self.kept @ vectors.T
        assert self.factors is not None
        tensors = self.factors.tensors.values()
        parts = vectors.split([j.size for j in tensors], dim=1)
        moved = [j.apply(part.contiguous()) for j, part in zip(tensors, parts, strict=True)]
        return sum(moved[1:], moved[0])

    def vjp(self, values: Tensor) -> Tensor:
        """Σ_b Jᵀ R u_b for values [B, C, S]: [S, P]."""
        if self.kept is not None:
            return values.flatten(0, 1).T @ self.kept.flatten(0, 1)
        assert self.factors is not None
        return self.factors.vjp(values)

    def like(self, vectors: Tensor) -> Rows:
        """In float64 where the vectors are: float32 products leave 1e-7 of the largest eigenvalue in the null space."""
        if self.factors is None or vectors.dtype == self.factors.outputs.dtype:
            return self
        tensors = {name: widened(j) for name, j in self.factors.tensors.items()}
        return Rows(None, BatchJacobians(wide(self.factors.outputs), tensors))


@dataclass
class GGNOperator:
    """Products with the rows of the training set, or of some of its points. Counts its passes over the data.

    `uniforms` [N, M, ·] belong to a sampled output curvature; `dtype` is that of vectors: float64 where the
    rows are kept, else the network's (products with float64 vectors are float64 there too, at twice the cost).
    """

    split: Split
    jacobians: Jacobians
    curvature: Roots
    uniforms: Tensor | None
    columns: int
    _progress: Progress = field(default=lambda stage, done, total: None, repr=False)
    repairs: Repairs = field(default_factory=Repairs, repr=False)
    passes: float = 0.0
    _kept: Tensor | None = field(default=None, repr=False)

    @classmethod
    def of(
        cls,
        task: Task,
        jacobians: Jacobians,
        curvature: Roots,
        progress: Progress,
        repairs: Repairs | None = None,
    ) -> GGNOperator:
        columns = curvature.columns(task, jacobians.network)
        counted = Repairs() if repairs is None else repairs
        return cls(task.train, jacobians, curvature, curvature.uniforms(task), columns, progress, counted)

    def state(self) -> dict[str, Any]:
        """What gives the same rows again (see `posteriors.io.Saves`): the training inputs as the network takes them."""
        first, _ = self.split.gather(torch.arange(1))
        if (size := len(self) * first.numel() * first.element_size()) > SAVED_BYTES:
            raise CannotBeSaved(
                "draws of a sampled Laplace posterior require the training inputs, which must take at most "
                f"{SAVED_BYTES / 2**30:.0f} GiB to be saved; they take {size / 2**30:.1f} GiB"
            )
        x, y = self.split.gather(torch.arange(len(self)))
        return {
            "x": x, "y": y, "jacobians": self.jacobians, "curvature": self.curvature,
            "uniforms": self.uniforms, "columns": self.columns,
        }  # fmt: skip

    @classmethod
    def from_state(cls, state: Mapping[str, Any]) -> GGNOperator:
        split = Split(state["x"], state["y"], torch.arange(len(state["x"])))
        return cls(split, state["jacobians"], state["curvature"], state["uniforms"], state["columns"])

    def __len__(self) -> int:
        return len(self.split)

    @property
    def keeps(self) -> bool:
        return 8 * len(self) * self.columns * self.size <= memory_limit().kept_bytes

    @property
    def size(self) -> int:
        """P."""
        return sum(self.jacobians.sizes().values())

    @property
    def dtype(self) -> torch.dtype:
        first = self.jacobians.network.parameters[self.jacobians.names[0]]
        return wide(first.new_zeros(0)).dtype if self.keeps else first.dtype

    @property
    def device(self) -> torch.device:
        first = self.jacobians.network.parameters[self.jacobians.names[0]]
        return wide(first.new_zeros(0)).device if self.keeps else first.device

    def batches(self, vectors: int, indices: Tensor | None = None) -> Iterator[tuple[Tensor, Rows]]:
        """Places [B] and rows of the training set in order, or of the points `indices`, for products with `vectors`."""
        where = torch.arange(len(self)) if indices is None else indices
        self.passes += len(where) / len(self)
        if self.keeps:
            if self._kept is None:
                self._kept = halving(self._dense, self.halve)
            yield where, Rows(self._kept if indices is None else self._kept[where.to(self._kept.device)], None)
            return
        for part, jacobians in self._made(where, vectors):
            yield part, Rows(None, jacobians)

    def derived(self, jacobians: Jacobians) -> Iterator[tuple[Tensor, BatchJacobians]]:
        """Places [B] and Rᵀ J of the training set in order, for the tensors of other `jacobians` of this network."""
        self.passes += 1
        yield from self._made(torch.arange(len(self)), "factors", jacobians)

    def halve(self) -> bool:
        """After memory ran out: half as many points at once from now on; False where it is one point already."""
        return self.jacobians.halve(self.repairs)

    def _dense(self) -> Tensor:
        """Every row, [N, C, P] float64."""
        return torch.cat([wide(j.dense()) for _, j in self._made(torch.arange(len(self)), "any")])

    def _made(
        self, where: Tensor, use: Any, jacobians: Jacobians | None = None
    ) -> Iterator[tuple[Tensor, BatchJacobians]]:
        jacobians = self.jacobians if jacobians is None else jacobians
        likelihood = self.jacobians.network.likelihood
        done = 0
        for part in where.split(jacobians.batch_size(self.columns, use=use)):
            self._progress("pass over the training set", done, len(where))
            done += len(part)
            x, y = self.split.gather(part)
            u = None if self.uniforms is None else self.uniforms[part.to(self.uniforms.device)]
            assert y is not None
            yield part, jacobians(x, partial(self.curvature.root, likelihood, y=y, uniforms=u))

    def product(self, vectors: Tensor, indices: Tensor | None = None) -> Tensor:
        """H v for vectors [S, P]: [S, P]; with `indices`, Σ over these points alone. One pass."""
        return self.jvp_then_vjp(vectors, lambda _, moved: moved, indices)

    def jvp_then_vjp(
        self, vectors: Tensor, between: Callable[[Tensor, Tensor], Tensor], indices: Tensor | None = None
    ) -> Tensor:
        """Σ_n J_nᵀ R_n u_n with u = between(places [B], Rᵀ J v [B, C, S]) for vectors v [S, P]: [S, P]. One pass."""

        def work() -> Tensor:
            total = torch.zeros_like(vectors)
            for part, rows in self.batches(len(vectors), indices):
                rows = rows.like(vectors)
                total += rows.vjp(between(part, rows.jvp(vectors)))
            return total

        return halving(work, self.halve)

    def vjp(self, values: Tensor) -> Tensor:
        """Σ_n J_nᵀ R_n u_n for values [N, C, S]: [S, P]. One pass."""

        def work() -> Tensor:
            total = torch.zeros(values.shape[-1], self.size, dtype=self.dtype, device=self.device)
            for part, rows in self.batches(len(total)):
                total += rows.vjp(values[part].to(total))
            return total

        return halving(work, self.halve)

    def diagonal(self, probes: int, seed: int) -> Tensor:
        """The diagonal of H, [P] float64: exact where the rows are kept or `probes` is at least C, else estimated.

        Σ_n mean_m (J_nᵀ R_n ε_nm)² over independent signs ε_nm [C] (Hutchinson 1990) has mean
        diag(H), and costs `probes` backward passes over the data instead of C.
        """
        if self.keeps:
            for _, rows in self.batches(1):
                assert rows.kept is not None
                return rows.kept.square().sum((0, 1))
        return halving(lambda: self._probed_diagonal(probes, seed), self.halve)

    def _probed_diagonal(self, probes: int, seed: int) -> Tensor:
        total, done = torch.zeros(self.size, dtype=torch.float64, device=self.device), 0
        columns, likelihood = min(probes, self.columns), self.jacobians.network.likelihood
        stream = generator(seed, "diagonal")
        self.passes += 1
        for part in torch.arange(len(self)).split(self.jacobians.batch_size(columns)):
            self._progress("diagonal of the curvature", done, len(self))
            done += len(part)
            x, y = self.split.gather(part)
            u = None if self.uniforms is None else self.uniforms[part.to(self.uniforms.device)]
            signs = torch.randint(0, 2, (len(part), self.columns, columns), generator=stream)

            def root(outputs: Tensor, y: Any = y, u: Any = u, signs: Tensor = signs) -> Tensor:
                made = self.curvature.root(likelihood, outputs, y=y, uniforms=u)
                return made if columns == self.columns else made @ (2.0 * signs - 1).to(made) / columns**0.5

            total += torch.cat([squares(j) for j in self.jacobians(x, root).tensors.values()])
        return total

    def targets(self, seed: int, start: int, stop: int) -> Tensor:
        """The noise ε [N, C, S] of draws `start` to `stop`, on the CPU."""
        shape = len(self), self.columns
        drawn = [
            torch.randn(shape, generator=generator(seed, "targets", s), dtype=torch.float64) for s in range(start, stop)
        ]
        return torch.stack(drawn, dim=-1).to(self.dtype)
